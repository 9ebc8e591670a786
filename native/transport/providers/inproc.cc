// inproc: two ends in one process; a queue each way, and one copy, so that a message belongs to its receiver alone.

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/condition_variable.h"
#include "base/copy.h"
#include "transport/providers/provider.h"
#include "transport/sideband/memory_region.h"

namespace geartrain {
namespace {

// One direction. Either end may hold it last: the two ends close independently.
struct Pipe {
  std::mutex mutex;
  ConditionVariable changed;
  std::deque<Message> queue;
  uint64_t queued_bytes = 0;
  bool closed = false;
  std::atomic<uint64_t> count{0};  // in the queue
  std::atomic<bool> asleep{false};
  Descriptor bell;  // the reader's eventfd
};

class InprocConnection final : public Connection {
 public:
  InprocConnection(const Options& options, std::shared_ptr<Pipe> in, std::shared_ptr<Pipe> out, Descriptor end,
                   std::string name, bool authenticated)
      : Connection(options, std::move(name), authenticated),
        in_(std::move(in)),
        out_(std::move(out)),
        end_(std::move(end)) {
    in_->bell = Descriptor(::dup(wake_.get()));
  }
  ~InprocConnection() override {
    if (!forked()) InprocConnection::hang_up();
  }

  const char* transport() const override { return "inproc"; }
  std::string describe() const override { return "inproc " + name(); }
  bool can_look() const override { return true; }
  std::vector<Wake> wakes() const override { return {{wake_.get(), true}}; }
  int end_descriptor() const override { return end_.get(); }
  std::string one_sided() const override { return "memory"; }
  // Before either end is used.
  static void introduce(InprocConnection& one, InprocConnection& other) {
    one.peer_regions_ = other.regions_;
    other.peer_regions_ = one.regions_;
  }

 protected:
  Path read_region(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset, Deadline) override {
    use(handle, offset, into.size(), false,
        [&](std::span<std::byte> from) { copy_large(into.data(), from.data(), into.size()); });
    return Path::memory;
  }

  Path write_region(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline) override {
    use(handle, offset, from.size(), true,
        [&](std::span<std::byte> into) { copy_large(into.data(), from.data(), from.size()); });
    return Path::memory;
  }

  bool look() const override { return in_->count.load(std::memory_order_acquire) != 0; }

  bool prepare_to_sleep() override {
    in_->asleep.store(true, std::memory_order_seq_cst);
    std::lock_guard lock(in_->mutex);
    if (in_->queue.empty() && !in_->closed) return true;
    in_->asleep.store(false, std::memory_order_relaxed);
    return false;
  }

  void hang_up() override {
    for (const auto& pipe : {in_, out_}) {
      std::lock_guard lock(pipe->mutex);
      pipe->closed = true;
      pipe->changed.notify_all();
      ring_bell(pipe->bell);
    }
    ::shutdown(end_.get(), SHUT_RDWR);
  }

  void write_message(const Outgoing& outgoing, Deadline deadline) override {
    Message message;
    std::vector<uint64_t> sizes;
    for (const Bytes& buffer : outgoing.buffers) sizes.push_back(buffer.size());
    make_room(&message, outgoing.header.size(), sizes);
    message.tag = outgoing.tag;
    message.kind = outgoing.kind;
    if (!outgoing.header.empty()) std::memcpy(message.header.data(), outgoing.header.data(), outgoing.header.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      copy_large(message.buffers[i].data(), outgoing.buffers[i].data(), sizes[i]);
    }
    const uint64_t bytes = message.bytes();
    std::unique_lock lock(out_->mutex);
    while (!out_->closed && !out_->queue.empty() && out_->queued_bytes + bytes > options_.limits.max_queued_bytes) {
      lock.unlock();
      check_usable();
      const bool progress = read_ahead();
      if (!progress && deadline.passed()) {
        fail(ErrorKind::timed_out, "the peer over ", describe(), " took no message before the deadline");
      }
      lock.lock();
      // Polls now and then for what the peer sends: that is in the other pipe.
      if (!progress) out_->changed.wait_for(lock, std::chrono::milliseconds(std::min(5, deadline.left_ms())));
    }
    if (out_->closed) {
      lock.unlock();
      lose("the peer over " + describe() + " hung up");
      fail_lost();
    }
    out_->queued_bytes += bytes;
    out_->queue.push_back(std::move(message));
    out_->count.fetch_add(1, std::memory_order_release);
    lock.unlock();
    if (out_->asleep.load(std::memory_order_seq_cst) && out_->asleep.exchange(false)) ring_bell(out_->bell);
    count_sent(Path::memory, bytes);
  }

  Poll read_message(Message* message) override {
    std::unique_lock lock(in_->mutex);
    if (in_->queue.empty()) {
      if (!in_->closed) return Poll::nothing;
      fail(ErrorKind::peer_lost, "the peer over ", describe(), " hung up");
    }
    *message = std::move(in_->queue.front());
    in_->queue.pop_front();
    in_->count.fetch_sub(1, std::memory_order_relaxed);
    const uint64_t bytes = message->bytes();
    in_->queued_bytes -= bytes;
    in_->changed.notify_one();
    lock.unlock();
    count_received(Path::memory, bytes);
    return Poll::message;
  }

 private:
  template <typename Do>
  void use(const RegionHandle& handle, uint64_t offset, uint64_t bytes, bool writing, Do&& act) {
    std::unique_lock lock(in_->mutex);
    if (in_->closed) {
      lock.unlock();
      lose("the peer over " + describe() + " hung up");
      fail_lost();
    }
    lock.unlock();
    const auto region = peer_regions_->find(handle.id);
    if (region == nullptr || region->closed()) check_access(Access::closed);
    check_access(allowed(region->handle(), offset, bytes, writing));
    if (!region->use(offset, bytes, act)) check_access(Access::closed);
  }

  std::shared_ptr<ExposedRegions> peer_regions_;
  const std::shared_ptr<Pipe> in_, out_;
  const Descriptor end_;  // one of a pair of sockets that carry nothing, and report the end
};

}  // namespace

std::pair<std::shared_ptr<Connection>, std::shared_ptr<Connection>> make_inproc(const Options& dialer,
                                                                                const Options& listener,
                                                                                bool authenticated) {
  auto there = std::make_shared<Pipe>(), back = std::make_shared<Pipe>();
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    fail(ErrorKind::os, "cannot make a pair of sockets: ", std::strerror(errno));
  }
  Session session;
  random_bytes(session.id);
  auto one =
      std::make_shared<InprocConnection>(dialer, back, there, Descriptor(ends[0]), session.name(), authenticated);
  auto other =
      std::make_shared<InprocConnection>(listener, there, back, Descriptor(ends[1]), session.name(), authenticated);
  InprocConnection::introduce(*one, *other);
  return {std::move(one), std::move(other)};
}

std::string inproc_not_viable() {
  return "";
}

}  // namespace geartrain
