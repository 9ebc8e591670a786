// Common to all connections: turns, waits, read-ahead, and the end.

#include "transport/connection.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/threads.h"
#include "transport/providers/frame.h"
#include "transport/sideband/memory_region.h"
#include "transport/sideband/sideband.h"

namespace geartrain {
namespace {

// What a look at a connection reads at most, of a peer that sends all the time.
constexpr int kMostReadsAhead = 1000;
constexpr size_t kMostShown = 1 << 16;

}  // namespace

// --- turns --------------------------------------------------------------------------------------------------------

Turn::Hold::Hold(Turn& turn, Deadline deadline, const char* what) : turn_(turn) {
  std::unique_lock lock(turn.mutex_);
  while (turn.taken_) {
    const uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) fail(ErrorKind::timed_out, "another thread was still ", what, " at the deadline");
    ++turn.waiting_;
    turn.free_.wait_for(lock, std::chrono::nanoseconds(left_ns));
    --turn.waiting_;
  }
  turn.taken_ = true;
}

Turn::Hold::~Hold() {
  std::lock_guard lock(turn_.mutex_);
  turn_.taken_ = false;
  if (turn_.waiting_ != 0) turn_.free_.notify_one();
}

// --- sending and receiving ----------------------------------------------------------------------------------------

Connection::Connection(const Options& options, std::string name, bool authenticated)
    : options_(options),
      wake_(make_bell()),
      regions_(std::make_shared<ExposedRegions>()),
      name_(std::move(name)),
      authenticated_(authenticated),
      patience_(options.spin_us) {}

Connection::~Connection() {
  if (!forked()) regions_->close();
}

void Connection::send(const Outgoing& message, Deadline deadline) {
  check_usable();
  const uint64_t payload = message.payload_bytes();
  if (message.header.size() > options_.limits.max_header_bytes || payload > options_.limits.max_message_bytes ||
      message.buffers.size() > options_.limits.max_buffers) {
    fail(ErrorKind::frame, "a message has a header of ", options_.limits.max_header_bytes, " bytes, ",
         options_.limits.max_buffers, " buffers and ", options_.limits.max_message_bytes,
         " bytes in them at most; found ", message.header.size(), ", ", message.buffers.size(), " and ", payload);
  }
  Turn::Hold turn(send_turn_, deadline, "sending");
  check_usable();
  if (lost()) fail_lost();
  write_message(message, deadline);
  add(messages_sent_, 1);
}

void Connection::receive(Message* message, Deadline deadline) {
  check_usable();
  Turn::Hold turn(receive_turn_, deadline, "receiving");
  for (;;) {
    check_usable();
    Poll found = poll_now(message);
    if (found == Poll::nothing) {
      found = spin(message, deadline);
      if (found == Poll::nothing) sleep(deadline);
    }
    if (found == Poll::message) return;
  }
}

Connection::Poll Connection::poll(Message* message) {
  check_usable();
  return poll_now(message);
}

Connection::Poll Connection::poll_now(Message* message) {
  std::lock_guard lock(read_mutex_);
  if (!ahead_.empty()) {
    *message = std::move(ahead_.front());
    ahead_.pop_front();
    ahead_bytes_ -= message->bytes();
    has_ahead_.store(!ahead_.empty(), std::memory_order_release);
    return Poll::message;
  }
  if (ended_) fail_lost();
  try {
    const Poll found = read_message(message);
    if (found == Poll::message) add(messages_received_, 1);
    return found;
  } catch (const Error& error) {
    ended_ = true;
    lose(error.what());
    if (error.kind == ErrorKind::peer_lost) fail_lost();  // for the reason that was first
    throw;
  } catch (const std::exception&) {
    ended_ = true;  // half a message has been taken
    lose("no memory for a message of the peer's");
    fail(ErrorKind::no_space, "no memory for a message of the peer's over ", describe());
  }
}

bool Connection::read_ahead() {
  std::unique_lock lock(read_mutex_, std::try_to_lock);
  if (!lock || ended_ || ahead_bytes_ >= options_.limits.max_queued_bytes) return false;
  Message message;
  try {
    const Poll found = read_message(&message);
    if (found != Poll::message) return found == Poll::more;
    add(messages_received_, 1);
  } catch (const std::exception& error) {
    ended_ = true;
    lose(error.what());
    return true;
  }
  ahead_bytes_ += message.bytes();
  ahead_.push_back(std::move(message));
  has_ahead_.store(true, std::memory_order_release);
  wake_self();
  return true;
}

Connection::Look Connection::look_for_end() {
  Look found;
  if (!forked()) {
    prepare_to_sleep();  // after which a read looks for the end where it else looks for messages alone
    for (int reads = 0; reads < kMostReadsAhead && !closed() && read_ahead(); ++reads) {
    }
    std::unique_lock lock(read_mutex_, std::try_to_lock);  // another thread's read finds the end itself
    if (lock && !ahead_.empty()) {
      const Message& last = ahead_.back();
      const auto* const text = reinterpret_cast<const char*>(last.header.data());
      found = {false, true, last.kind, {text, std::min(last.header.size(), kMostShown)}};
    }
  }
  found.lost = lost();
  return found;
}

// A poll before a sleep. `more`: something has come, or this end was closed.
Connection::Poll Connection::spin(Message* message, Deadline deadline) {
  if (can_look()) {
    const bool found = patience_.poll(Patience::kLooks, deadline, [&] { return might_have_data() || closed(); });
    return found ? Poll::more : Poll::nothing;
  }
  Poll polled = Poll::nothing;
  patience_.poll(1, deadline, [&] {
    polled = closed() ? Poll::more : poll_now(message);
    return polled != Poll::nothing;
  });
  return polled;
}

bool Connection::arm() {
  if (has_ahead_.load(std::memory_order_acquire) || closed()) return false;
  return prepare_to_sleep();
}

void Connection::sleep(Deadline deadline) {
  if (deadline.passed()) fail(ErrorKind::timed_out, "nothing came before the deadline over ", describe());
  if (!arm()) return;
  if (!sleeper_) {
    Descriptor made(::epoll_create1(EPOLL_CLOEXEC));  // kept only when it watches all of them
    if (!made) fail(ErrorKind::os, "cannot make an epoll: ", std::strerror(errno));
    for (const Wake& wake : wakes()) {
      struct epoll_event event{};
      event.events = EPOLLIN | EPOLLRDHUP | (wake.edge ? EPOLLET : 0u);
      if (::epoll_ctl(made.get(), EPOLL_CTL_ADD, wake.fd, &event) != 0) {
        fail(ErrorKind::os, "cannot watch a descriptor: ", std::strerror(errno));
      }
    }
    sleeper_ = std::move(made);
  }
  struct epoll_event events[4];
  ::epoll_wait(sleeper_.get(), events, 4, deadline.left_ms());  // a signal or nothing: the caller polls again
}

// --- one-sided ----------------------------------------------------------------------------------------------------

template <typename Do>
void Connection::access(Do&& act) {
  check_usable();
  if (lost()) fail_lost();
  try {
    act();
  } catch (const Error& error) {
    if (error.kind != ErrorKind::peer_lost) throw;
    check_usable();
    if (lost()) fail_lost();
    throw;
  }
}

std::shared_ptr<ExposedRegion> Connection::expose(std::span<std::byte> memory, bool writable) {
  check_usable();
  return regions_->add(memory, writable);
}

void Connection::read(Bytes handle, std::span<std::byte> into, uint64_t offset, Deadline deadline) {
  access([&] { count_received(read_region(RegionHandle::parse(handle), into, offset, deadline), into.size()); });
}

void Connection::write(Bytes handle, Bytes from, uint64_t offset, Deadline deadline) {
  access([&] { count_sent(write_region(RegionHandle::parse(handle), from, offset, deadline), from.size()); });
}

Path Connection::read_region(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset,
                             Deadline deadline) {
  if (sideband_ == nullptr) fail(ErrorKind::not_viable, "this connection has no sideband");
  return sideband_->read(handle, into, offset, deadline);
}

Path Connection::write_region(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline deadline) {
  if (sideband_ == nullptr) fail(ErrorKind::not_viable, "this connection has no sideband");
  return sideband_->write(handle, from, offset, deadline);
}

void Connection::start_sideband(Stream socket, int peer, const std::string& why) {
  Sideband::Setup setup;
  setup.socket = std::move(socket);
  setup.peer = options_.cross_memory ? peer : 0;
  setup.out_of_reach = options_.cross_memory ? why : "cross_memory is off";
  setup.peer_timeout_s = options_.peer_timeout_s;
  setup.regions = regions_;
  setup.lost = [this](const std::string& reason) { lose("the peer over " + describe() + " " + reason); };
  setup.ended = [this] {
    if (!lost()) wake_self();
  };
  sideband_ = std::make_shared<Sideband>(std::move(setup));
  try {
    sideband_->start();
  } catch (...) {
    sideband_->stop();  // its thread must not report to a connection that is never made
    throw;
  }
}

void Connection::stop_sideband() {
  if (sideband_ != nullptr) sideband_->stop();
}

std::string Connection::one_sided() const {
  return sideband_ == nullptr || forked() ? "" : sideband_->access_path();  // it has a lock, perhaps held at the fork
}

// --- the end ------------------------------------------------------------------------------------------------------

void Connection::close() {
  if (forked() || !life_.close()) return;
  lose("it was closed on this side");
  wake_self();
}

void Connection::lose(const std::string& reason) {
  {
    std::lock_guard lock(reason_mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  if (lost_.exchange(true)) return;
  hang_up();
  regions_->close();
  if (sideband_ != nullptr) sideband_->hang_up();
}

void Connection::fail_lost() const {
  std::lock_guard lock(reason_mutex_);
  fail(ErrorKind::peer_lost, reason_);
}

ConnectionCounts Connection::counts() const {
  ConnectionCounts counts;
  counts.messages_sent = messages_sent_.load(std::memory_order_relaxed);
  counts.messages_received = messages_received_.load(std::memory_order_relaxed);
  for (size_t i = 0; i < kPathCount; ++i) {
    counts.bytes_sent[i] = bytes_sent_[i].load(std::memory_order_relaxed);
    counts.bytes_received[i] = bytes_received_[i].load(std::memory_order_relaxed);
  }
  return counts;
}

}  // namespace geartrain
