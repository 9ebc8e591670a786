#include "collectives/reducer.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace geartrain {
namespace {

constexpr double kLastFramesS = 0.5;  // of close(), for the ranks to be told
constexpr size_t kKeptBlocks = 4096;  // of all threads, free and warm

}  // namespace

// --- one thread -----------------------------------------------------------------------------------------------------

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

// --- the reducer ----------------------------------------------------------------------------------------------------

Reducer::Reducer(const ReducerOptions& options) : shared_(options) {
  if (options.threads == 0 || options.threads > kMostReducerThreads) {
    fail(ErrorKind::argument, "a reducer has 1 to ", kMostReducerThreads, " threads, found ", options.threads);
  }
  for (uint32_t i = 0; i < options.threads; ++i) shared_.threads.push_back(std::make_unique<ReducerThread>(shared_));
  // The one that listens comes last: it passes connections on to all others.
  for (uint32_t i = options.threads; i-- != 0;) threads_[i]->start(i == 0);
}

Reducer::~Reducer() {
  stop();
}

void Reducer::stop() {
  threads_[0]->stop_listening();
  for (const auto& thread : threads_) thread->stop();
}

ReducerCounts Reducer::counts() {
  life_.check_process();
  ReducerCounts out;
  bool open = true;
  for (const auto& thread : threads_) open = open && thread->count(&out);
  if (!open) life_.refuse();
  shared_.groups.count(&out);
  for (const auto& thread : threads_) out.refused += thread->refused();
  return out;
}

void Reducer::close(Deadline deadline) {
  if (life_.forked()) return;
  if (!life_.close(deadline)) {
    life_.wait_until_left();
    return;
  }
  try {
    leave();
  } catch (const std::exception&) {
    // Memory runs out: then without a word.
  }
  stop();
  life_.left();
}

// Whether `what` holds of all threads before `passed`. False too when one has ended.
template <typename Passed>
bool Reducer::wait_for_all(bool (ReducerThread::*what)(bool*), const Passed& passed) {
  for (;;) {
    bool all = true;
    for (const auto& thread : threads_) {
      bool done = false;
      if (!((*thread).*what)(&done)) return false;
      all = all && done;
    }
    if (all) return true;
    if (passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Reducer::leave() {
  for (const auto& thread : threads_) {
    if (!thread->refuse_groups()) return;
  }
  wait_for_all(&ReducerThread::has_ended, [&] { return life_.deadline().passed(); });
  for (const auto& thread : threads_) {
    if (!thread->end_sessions()) return;
  }
  const Deadline last = Deadline::after(kLastFramesS);
  wait_for_all(&ReducerThread::has_told, [&] { return last.passed(); });
}

}  // namespace geartrain
