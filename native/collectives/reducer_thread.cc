#include "collectives/reducer_thread.h"

#include <algorithm>
#include <cstring>

#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr size_t kKeptBlocks = 4096;  // of all threads, free and warm

}  // namespace

// What fails outside of a group's session is a connection that is refused or dropped.
ReducerThread::ReducerThread(Shared& shared)
    : shared_(shared),
      blocks_(kKeptBlocks / shared.options.threads),
      sessions_(loop_, shared.groups, shared.options.max_window_bytes, shared.address),
      loop_("geartr. reducer", [](const std::exception&) {}) {}

ReducerThread::~ReducerThread() {
  loop_.stop();
  sessions_.clear();
  acceptor_.reset();
}

void ReducerThread::start(bool listens) {
  const ReducerOptions& given = shared_.options;
  AcceptorOptions options;
  options.host = given.host;
  options.port = given.port;
  options.advertise = {given.host};
  options.secret = given.secret;
  options.shm = given.shm;
  options.max_window_bytes = given.max_window_bytes;
  options.listens = listens;
  // On the loop: connections are looked at only when this is over.
  loop_.call([&] {
    acceptor_ = std::make_unique<Acceptor>(loop_, options, *this);
    if (listens) shared_.address = Address::parse(acceptor_->address()).tcp.front();
    loop_.on_time([this] { return on_time(); });
  });
}

void ReducerThread::stop() {
  loop_.stop();
  acceptor_->hang_up();
  sessions_.clear();  // their ranks see the end now, and not when this is destroyed
}

bool ReducerThread::count(ReducerCounts* out) {
  return loop_.call([&] {
    out->memory_bytes += blocks_.in_use() * sizeof(ChunkBuffer);
    sessions_.count(out);
  });
}

bool ReducerThread::refuse_groups() {
  return loop_.call([&] { sessions_.leave(); });
}

bool ReducerThread::has_ended(bool* all) {
  return loop_.call([&] {
    on_time();
    *all = sessions_.empty();
  });
}

bool ReducerThread::end_sessions() {
  return loop_.call([&] { sessions_.stop("reducer " + shared_.address + " was stopped"); });
}

bool ReducerThread::has_told(bool* all) {
  return loop_.call([&] { *all = sessions_.drained(); });
}

Acceptor* ReducerThread::acceptor_for(const Join& join) {
  uint32_t digest;  // the group's id is one already
  std::memcpy(&digest, join.group, sizeof digest);
  return shared_.threads[(uint64_t{digest} + join.channel) % shared_.threads.size()]->acceptor_.get();
}

uint64_t ReducerThread::on_time() {
  sessions_.remove_empty();
  return acceptor_->due();
}

}  // namespace geartrain
