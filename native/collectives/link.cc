#include "collectives/link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/sha256.h"
#include "transport/sideband/memory_region.h"

namespace geartrain {
namespace {

// --- TCP ------------------------------------------------------------------------------------------------------------

// What the kernel may hold unsent: two turns of a peer. More would only stand in a queue that cannot be reordered.
constexpr int kUnsentBytes = 32 << 10;

class TcpLink final : public Link {
 public:
  explicit TcpLink(Descriptor socket) : Link(std::move(socket)) {
    const int on = 1, unsent = kUnsentBytes, never = 0;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    // A stopped rank is reported by its name, after the operation's own deadline, not by the kernel after its.
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &never, sizeof never);
  }

  size_t write(std::span<struct iovec> parts) override {
    struct msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    for (;;) {
      const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent >= 0) return static_cast<size_t>(sent);
      if (errno == EAGAIN) return 0;
      if (errno != EINTR) fail(ErrorKind::peer_lost, std::strerror(errno));
    }
  }

  size_t read(std::span<struct iovec> parts) override {
    struct msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    for (;;) {
      const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
      if (got > 0) return static_cast<size_t>(got);
      if (got == 0) fail(ErrorKind::peer_lost, "connection closed");
      if (errno == EAGAIN) return 0;
      if (errno != EINTR) fail(ErrorKind::peer_lost, std::strerror(errno));
    }
  }

  const char* name() const override { return "tcp"; }
};

// --- shared memory --------------------------------------------------------------------------------------------------

// What a side that sleeps says: whether something is in progress there.
constexpr uint32_t kSleepsIdle = 1, kSleepsWaiting = 2;
constexpr char kRingMagic[8] = {'G', 'T', 'R', 'I', 'N', 'G', '1', '\n'};

struct SharedRing {
  char magic[8];
  uint64_t bytes;
  uint64_t stamp;
  std::atomic<uint64_t> stamp_at;  // in the writer's memory; 0 until it has written `stamp`
  alignas(64) std::atomic<uint64_t> written;
  std::atomic<uint32_t> writer_sleeps;
  alignas(64) std::atomic<uint64_t> taken;
  std::atomic<uint32_t> reader_sleeps;
  alignas(128) std::byte data[];
};
static_assert(offsetof(SharedRing, written) == 64 && offsetof(SharedRing, taken) == 128 &&
              offsetof(SharedRing, data) == 256);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

constexpr uint64_t kFreedBytes = kLinkRingBytes / 8;  // that were read, at most, before the writer hears of it
constexpr uint64_t kOneRing = sizeof(SharedRing) + kLinkRingBytes;

class RingLink final : public Link {
 public:
  RingLink(Descriptor socket, const Descriptor& memory, Descriptor wake, bool dialer)
      : Link(std::move(socket)), memory_(open_memory(memory, 2 * kOneRing)), wake_(std::move(wake)) {
    auto* const first = reinterpret_cast<SharedRing*>(memory_.data());
    auto* const second = reinterpret_cast<SharedRing*>(memory_.data() + kOneRing);
    for (const SharedRing* one : {first, second}) {
      if (std::memcmp(one->magic, kRingMagic, sizeof kRingMagic) != 0 || one->bytes != kLinkRingBytes) {
        fail(ErrorKind::frame, "its shared memory holds no ring");
      }
    }
    out_ = dialer ? first : second;
    in_ = dialer ? second : first;
    std::array<uint8_t, sizeof(uint64_t)> random;
    random_bytes(random);
    std::memcpy(&own_stamp_, random.data(), sizeof own_stamp_);
    struct ucred who{};
    socklen_t size = sizeof who;
    if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0) peer_ = who.pid;
  }
  ~RingLink() override { take_back(); }

  size_t write(std::span<struct iovec> parts) override {
    // What the reader has taken is looked at where it matters: it writes to that cache line all the time.
    uint64_t free = kLinkRingBytes - in_ring(written_, their_taken_);
    size_t wanted = 0;
    for (const struct iovec& part : parts) wanted += part.iov_len;
    if (free < wanted) {
      their_taken_ = out_->taken.load(std::memory_order_acquire);
      free = kLinkRingBytes - in_ring(written_, their_taken_);
    }
    const StageClock::Scope scope(stages_, Stage::copy_out);
    size_t done = 0;
    for (const struct iovec& part : parts) {
      const size_t n = std::min<uint64_t>(part.iov_len, free - done);
      const size_t at = (written_ + done) % kLinkRingBytes, first = std::min(n, kLinkRingBytes - at);
      std::memcpy(out_->data + at, part.iov_base, first);
      std::memcpy(out_->data, static_cast<std::byte*>(part.iov_base) + first, n - first);
      done += n;
    }
    blocked_ = done == free;
    if (done == 0) return 0;
    written_ += done;
    out_->written.store(written_, std::memory_order_seq_cst);
    if (const uint32_t sleeps = out_->reader_sleeps.load(std::memory_order_seq_cst); sleeps != 0) {
      held_ = hold_ && sleeps == kSleepsIdle;
      if (!held_) wake(&out_->reader_sleeps);
    }
    return done;
  }

  size_t read(std::span<struct iovec> parts) override {
    const uint64_t there = in_ring(in_->written.load(std::memory_order_acquire), taken_);
    if (stages_ != nullptr && there != 0) stages_->found();
    const StageClock::Scope scope(there != 0 ? stages_ : nullptr, Stage::copy_in);
    size_t done = 0;
    for (const struct iovec& part : parts) {
      const size_t n = std::min<uint64_t>(part.iov_len, there - done);
      const size_t at = (taken_ + done) % kLinkRingBytes, first = std::min(n, kLinkRingBytes - at);
      std::memcpy(part.iov_base, in_->data + at, first);
      std::memcpy(static_cast<std::byte*>(part.iov_base) + first, in_->data, n - first);
      done += n;
    }
    if (done == 0) {
      // Only an empty ring may report the end: what came before it must be read first.
      if (ended_) fail(ErrorKind::peer_lost, "connection closed");
      return 0;
    }
    skip(done);
    return done;
  }

  std::span<const std::byte> in_place(size_t bytes) const override {
    const size_t at = taken_ % kLinkRingBytes;
    if (bytes > kLinkRingBytes - at) return {};
    if (in_ring(in_->written.load(std::memory_order_acquire), taken_) < bytes) return {};
    return {in_->data + at, bytes};
  }

  void skip(size_t bytes) override {
    taken_ += bytes;
    if (taken_ - freed_ >= kFreedBytes) free_read();
  }

  void free_read() override {
    if (freed_ == taken_) return;
    freed_ = taken_;
    in_->taken.store(taken_, std::memory_order_seq_cst);
    if (in_->writer_sleeps.load(std::memory_order_seq_cst) != 0) wake(&in_->writer_sleeps);
  }

  bool announce_sleep(bool reads, bool waited) override {
    if (reads) in_->reader_sleeps.store(waited ? kSleepsWaiting : kSleepsIdle, std::memory_order_seq_cst);
    if (blocked_) out_->writer_sleeps.store(kSleepsWaiting, std::memory_order_seq_cst);
    if (reads && in_->written.load(std::memory_order_seq_cst) != taken_) return false;
    return !blocked_ || written_ - out_->taken.load(std::memory_order_seq_cst) >= kLinkRingBytes;
  }

  void announce_wake() override {
    in_->reader_sleeps.store(0, std::memory_order_relaxed);
    out_->writer_sleeps.store(0, std::memory_order_relaxed);
  }

  void hold_wakes(bool hold) override {
    hold_ = hold;
    if (!hold) send_wakes();
  }

  void send_wakes() override {
    if (!held_) return;
    held_ = false;
    if (out_->taken.load(std::memory_order_seq_cst) == written_) return;  // it has looked, and sleeps again
    if (out_->reader_sleeps.load(std::memory_order_seq_cst) != 0) wake(&out_->reader_sleeps);
  }

  void allow_reading() override {
    allowed_ = true;
    out_->stamp = own_stamp_;
    stamp_.store(own_stamp_, std::memory_order_relaxed);
    out_->stamp_at.store(reinterpret_cast<uintptr_t>(&stamp_), std::memory_order_release);
  }

  bool reads_peer() override {
    if (!allowed_) return false;
    if (readable_ == Readable::unknown) {
      const uint64_t at = in_->stamp_at.load(std::memory_order_acquire);
      if (at == 0) return false;  // it is still being set up: the next operation asks again
      their_stamp_ = in_->stamp;
      stamp_at_ = at;
      readable_ = peer_ > 0 && stamp() == ReadExposed::read ? Readable::yes : Readable::no;
    }
    return readable_ == Readable::yes;
  }

  bool read_denied() const override { return readable_ == Readable::lost; }

  ReadExposed read_exposed(uint64_t address, std::span<std::byte> into) override {
    if (read_denied()) return ReadExposed::denied;
    if (!reads_peer()) return Link::read_exposed(address, into);
    // In this order: the stamp is what it was when the bytes have been read.
    uint64_t found = 0;
    const auto at = [](uint64_t where) { return reinterpret_cast<void*>(static_cast<uintptr_t>(where)); };
    const struct iovec mine[2] = {{into.data(), into.size()}, {&found, sizeof found}};
    const struct iovec theirs[2] = {{at(address), into.size()}, {at(stamp_at_), sizeof found}};
    const StageClock::Scope scope(stages_, Stage::read);
    const ssize_t got = ::process_vm_readv(peer_, mine, 2, theirs, 2, 0);
    if (got == static_cast<ssize_t>(into.size() + sizeof found) && found == their_stamp_) return ReadExposed::read;
    const int error = got == static_cast<ssize_t>(into.size() + sizeof found) ? 0 : got < 0 ? errno : EFAULT;
    const ReadExposed after = still_exposes();
    return after == ReadExposed::read && error != 0 ? ReadExposed::denied : after;
  }

  ReadExposed still_exposes() override {
    if (read_denied()) return ReadExposed::denied;
    if (!reads_peer()) return ReadExposed::read;
    const ReadExposed now = stamp();
    if (now == ReadExposed::denied) readable_ = Readable::lost;
    return now;
  }

  void take_back() noexcept override { stamp_.store(0, std::memory_order_seq_cst); }

  bool polled() const override { return true; }
  const char* name() const override { return "shm"; }
  void end() override { ended_ = true; }

 private:
  static uint64_t in_ring(uint64_t written, uint64_t taken) {
    if (written - taken > kLinkRingBytes) fail(ErrorKind::peer_lost, "its ring is corrupt");
    return written - taken;
  }

  void wake(std::atomic<uint32_t>* sleeps) {
    const StageClock::Scope scope(stages_, Stage::wake);
    sleeps->store(0, std::memory_order_relaxed);
    ring_bell(wake_);
  }

  // A process that is gone has withdrawn everything; its socket reports it.
  ReadExposed stamp() const {
    uint64_t found = 0;
    const int error = peek(peer_, stamp_at_, std::as_writable_bytes(std::span(&found, 1)));
    if (error != 0 && error != ESRCH) return ReadExposed::denied;
    return error == 0 && found == their_stamp_ && found != 0 ? ReadExposed::read : ReadExposed::withdrawn;
  }

  const Memory memory_;
  const Descriptor wake_;
  std::atomic<uint64_t> stamp_{0};
  pid_t peer_ = 0;
  uint64_t stamp_at_ = 0, their_stamp_ = 0, own_stamp_ = 0;
  bool allowed_ = false;
  enum class Readable : uint8_t { unknown, yes, no, lost } readable_ = Readable::unknown;
  SharedRing *out_, *in_;
  uint64_t written_ = 0, taken_ = 0, freed_ = 0;  // never read back from memory that the peer can write
  uint64_t their_taken_ = 0;                      // as seen last
  bool blocked_ = false, ended_ = false;
  bool hold_ = false, held_ = false;  // wakes of the peer's reader
};

}  // namespace

ReadExposed Link::read_exposed(uint64_t, std::span<std::byte>) {
  fail(ErrorKind::frame, "it exposes memory to a member that cannot read it");
}

std::unique_ptr<Link> tcp_link(Descriptor socket) {
  return std::make_unique<TcpLink>(std::move(socket));
}

RingMemory RingMemory::make() {
  RingMemory made{make_memory("geartrain rings", 2 * kOneRing)};
  const Memory memory(made.memory.get(), 2 * kOneRing, true);
  for (const uint64_t at : {uint64_t{0}, kOneRing}) {
    auto* const ring = reinterpret_cast<SharedRing*>(memory.data() + at);
    std::memcpy(ring->magic, kRingMagic, sizeof kRingMagic);
    ring->bytes = kLinkRingBytes;
  }
  return made;
}

std::unique_ptr<Link> ring_link(Descriptor socket, const Descriptor& memory, Descriptor wake, bool dialer) {
  return std::make_unique<RingLink>(std::move(socket), memory, std::move(wake), dialer);
}

}  // namespace geartrain
