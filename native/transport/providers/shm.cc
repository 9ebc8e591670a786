// shm: two processes on one host. Small messages are in a ring in shared memory, big ones in memfd segments that the
// sender keeps and leases; a Unix socket carries descriptors, and reports the peer's end.
//
// shm_control.h draws the shared memory. The receiver copies everything out of the ring before it reads it, because
// the sender could change it meanwhile.
//
// Sleeping. A receiver that finds nothing sets `asleep`, polls again, and waits for its eventfd, which the sender
// writes when it finds `asleep` set. A sender without room does the same with `short_of_room`. So while both are
// busy, messages cost no system call. No thread ever reads an eventfd: waits are edge-triggered, and any number of
// threads may wait at once.
//
// Segments (shm_segments.h). A segment is leased by the sender before the frame that names it is visible, and returned
// by the receiver when the last reference to the message is dropped. Segments are sealed against shrinking, so reading
// them cannot fault; nothing here depends on the size of /dev/shm, and nothing has a name that could be left behind.
// A receiver that copies is sent big messages in parts (shm_parts.h), so that both sides copy at the same time.
//
// Death. The kernel closes the socket of a process that dies: the other side takes what is whole in the ring, and
// then its connection ends. Messages it still uses stay valid, because the kernel keeps memory that is mapped.

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/copy.h"
#include "transport/memfd.h"
#include "transport/providers/frame.h"
#include "transport/providers/provider.h"
#include "transport/providers/shm_control.h"
#include "transport/providers/shm_parts.h"
#include "transport/providers/shm_segments.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr uint64_t kInlineMost = uint64_t{32} << 10;    // frames up to this size are in the ring whole
constexpr uint64_t kInlineHeader = uint64_t{16} << 10;  // headers up to this size, when the buffers do not
constexpr uint64_t kViewFrom = uint64_t{512} << 10;     // a smaller message is copied: that is soon done
constexpr uint64_t kPartsFrom = uint64_t{512} << 10;
constexpr double kPartSpinUs = 50;           // a part is copied sooner
constexpr double kStallS = 0.005;            // then the peer is busy with something else
constexpr uint64_t kGlanceNs = 5'000'000;    // how often a busy sender checks the peer's liveness
constexpr uint32_t kMostViews = kSlots / 2;  // the others stay free for messages that are copied

// A message's lease of the peer's segment.
struct Lease {
  std::shared_ptr<ShmControl> control;
  std::shared_ptr<Memory> segment;
  std::shared_ptr<void> header;
  std::shared_ptr<std::atomic<uint64_t>> viewed_bytes, views;
  uint32_t slot;
  uint64_t bytes;

  ~Lease() {
    if (control->owned.forked()) return;  // a forked child's copy: the parent's is still valid
    Direction& in = control->direction(false);
    in.leased[slot].store(0, std::memory_order_release);
    viewed_bytes->fetch_sub(bytes, std::memory_order_relaxed);
    views->fetch_sub(1, std::memory_order_relaxed);
    control->wake_if(in.short_of_room);
  }
};

class ShmConnection final : public Connection {
 public:
  ShmConnection(Descriptor socket, std::shared_ptr<ShmControl> control, Descriptor wake, Descriptor sideband,
                const Session& session, const Options& options)
      : Connection(options, session.name(), session.authenticated),
        socket_(std::move(socket)),
        control_(std::move(control)),
        out_(control_->direction(true)),
        in_(control_->direction(false)),
        own_(socket_, out_, options.limits.max_segment_bytes),
        theirs_(socket_) {
    wake_ = std::move(wake);
    if (!options.views) in_.takes_parts.store(1, std::memory_order_relaxed);
    struct ucred who{};
    socklen_t size = sizeof who;
    const bool known = ::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0;
    start_sideband(std::move(sideband), known ? who.pid : 0,
                   "the peer's process is not in sight: another pid namespace");
  }
  ~ShmConnection() override { stop_sideband(); }

  const char* transport() const override { return "shm"; }
  std::string describe() const override { return "shm " + name(); }
  bool can_look() const override { return true; }
  std::vector<Wake> wakes() const override { return {{wake_.get(), true}, {socket_.get(), false}}; }
  int end_descriptor() const override { return socket_.get(); }

 protected:
  bool look() const override {
    return in_.head.load(std::memory_order_acquire) != tail_.load(std::memory_order_relaxed);
  }

  bool prepare_to_sleep() override {
    check_socket_.store(true, std::memory_order_relaxed);
    in_.asleep.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!look()) return true;
    in_.asleep.store(0, std::memory_order_relaxed);
    return false;
  }

  void hang_up() override { ::shutdown(socket_.get(), SHUT_RDWR); }

  // --- sending ----------------------------------------------------------------------------------------------------

  void write_message(const Outgoing& message, Deadline deadline) override {
    glance();
    const size_t n = message.buffers.size();
    const uint64_t payload = message.payload_bytes();
    const uint64_t whole = sizeof(FrameHeader) + 8 * n + message.header.size() + payload;
    if (whole <= kInlineMost) {
      wait_for_room(whole, deadline);
      uint64_t at = put_frame(frame_of(message, 0), message);
      at = control_->put(at, message.header);
      for (const Bytes& buffer : message.buffers) at = control_->put(at, buffer);
      publish(at);
      count_sent(Path::ring, message.header.size() + payload);
      return;
    }
    const bool header_too = message.header.size() > kInlineHeader;
    if (!header_too && payload >= kPartsFrom && out_.takes_parts.load(std::memory_order_relaxed) != 0 &&
        write_in_parts(message, payload, deadline)) {
      count_sent(Path::segment, message.header.size() + payload);
      return;
    }
    uint64_t needed = header_too ? padded(message.header.size()) : 0;
    for (const Bytes& buffer : message.buffers) needed += padded(buffer.size());
    const uint32_t slot = find_segment([&] { return own_.try_take(needed, deadline); }, deadline);
    std::byte* to = own_.data(slot);
    if (header_too) {
      copy_large(to, message.header.data(), message.header.size());
      to += padded(message.header.size());
    }
    for (const Bytes& buffer : message.buffers) {
      copy_large(to, buffer.data(), buffer.size());
      to += padded(buffer.size());
    }
    const uint64_t record =
        sizeof(FrameHeader) + 8 * n + sizeof(SegmentPlace) + (header_too ? 0 : message.header.size());
    wait_for_room(record, deadline);
    const uint16_t flags = kInSegment | (header_too ? kHeaderInSegment : 0);
    uint64_t at = put_frame(frame_of(message, flags), message);
    const SegmentPlace place = own_.lease(slot);
    at = control_->put(at, std::as_bytes(std::span(&place, 1)));
    if (!header_too) at = control_->put(at, message.header);
    publish(at);
    count_sent(Path::segment, message.header.size() + payload);
  }

 private:
  // A busy sender makes no system call that would report the peer's end.
  void glance() {
    const uint64_t now = monotonic_ns();
    if (now - glanced_ns_ < kGlanceNs) return;
    glanced_ns_ = now;
    struct pollfd one = {socket_.get(), POLLRDHUP, 0};
    if (::poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) end_of_peer();
  }

  [[noreturn]] void end_of_peer() {
    lose("the peer over " + describe() + " is gone: it died, or hung up");
    fail_lost();
  }

  uint64_t room() const { return kRingBytes - (head_ - out_.tail.load(std::memory_order_acquire)); }

  void wait_for_room(uint64_t bytes, Deadline deadline) {
    const uint64_t needed = (bytes + 7) / 8 * 8;
    wait_until([&] { return room() >= needed; }, deadline, "took no message");
  }

  template <typename True>
  void wait_until(True&& is_true, Deadline deadline, const char* what) {
    if (!wait_for_peer(is_true, deadline)) {
      fail(ErrorKind::timed_out, "the peer over ", describe(), " ", what, " before the deadline");
    }
  }

  // Waits until the peer has made it true; reads what it sends meanwhile. False at the deadline.
  template <typename True>
  bool wait_for_peer(True&& is_true, Deadline deadline) {
    while (!is_true()) {
      check_usable();
      if (lost()) fail_lost();
      out_.short_of_room.store(1, std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (is_true()) break;
      if (read_ahead()) continue;
      if (deadline.passed()) return false;
      if (!sender_sleeper_) watch_for_sender();
      struct epoll_event events[2];
      // The peer signals when there is room. Data that it sends meanwhile is detected here as well.
      const int ms = prepare_to_sleep() ? deadline.left_ms() : std::min(1, deadline.left_ms());
      const int ready = ::epoll_wait(sender_sleeper_.get(), events, 2, ms);
      for (int i = 0; i < ready; ++i) {
        if ((events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0 && !is_true()) end_of_peer();
      }
    }
    out_.short_of_room.store(0, std::memory_order_relaxed);
    return true;
  }

  void watch_for_sender() {
    Descriptor made(::epoll_create1(EPOLL_CLOEXEC));  // kept only when it watches all of them
    if (!made) fail(ErrorKind::os, "cannot make an epoll: ", std::strerror(errno));
    for (const Wake& wake : wakes()) {
      struct epoll_event event{};
      event.events = EPOLLRDHUP | EPOLLET | (wake.edge ? EPOLLIN : 0u);
      if (::epoll_ctl(made.get(), EPOLL_CTL_ADD, wake.fd, &event) != 0) {
        fail(ErrorKind::os, "cannot watch a descriptor: ", std::strerror(errno));
      }
    }
    sender_sleeper_ = std::move(made);
  }

  uint64_t put_frame(const FrameHeader& frame, const Outgoing& message) {
    uint64_t at = control_->put(head_, std::as_bytes(std::span(&frame, 1)));
    for (const Bytes& buffer : message.buffers) {
      const uint64_t size = buffer.size();
      at = control_->put(at, std::as_bytes(std::span(&size, 1)));
    }
    return at;
  }

  void publish(uint64_t at) {
    head_ = (at + 7) / 8 * 8;
    out_.head.store(head_, std::memory_order_release);
    control_->wake_if(out_.asleep);
  }

  // What `take` finds, kSlots while there is none.
  template <typename Take>
  uint32_t find_segment(Take&& take, Deadline deadline) {
    uint32_t found = kSlots;
    wait_until([&] { return (found = taken(take)) != kSlots; }, deadline, "returned no segment");
    return found;
  }

  template <typename Take>
  uint32_t taken(Take&& take) {
    try {
      return take();
    } catch (const std::exception& error) {
      if (own_.broken()) lose(error.what());
      throw;
    }
  }

  // --- sending in parts -------------------------------------------------------------------------------------------

  // False, and nothing was sent, when the peer takes none now. When it throws in the middle, the peer drops the
  // message.
  bool write_in_parts(const Outgoing& message, uint64_t payload, Deadline deadline) {
    if (out_.tail.load(std::memory_order_acquire) < stalled_at_) return false;  // it is busy still
    bytes_out_.clear();
    for (const Bytes& buffer : message.buffers) bytes_out_.add(buffer);
    const uint64_t each = part_bytes(payload);
    const uint64_t beginning = sizeof(FrameHeader) + 8 * message.buffers.size() + message.header.size();
    uint64_t done = 0;
    try {
      while (done != payload) {
        const uint64_t left = payload - done;
        uint64_t bytes = std::min(each, left);
        uint32_t slot = find_part(left, deadline);
        if (slot == kSlots) {
          stalled_at_ = head_;
          if (done == 0) return false;
          bytes = left;
          slot = find_segment([&] { return own_.try_take(left, deadline); }, deadline);
        }
        gather(bytes_out_, done, {own_.data(slot), bytes});
        wait_for_room((done == 0 ? beginning + 8 : 0) + 2 * sizeof(SegmentPart), deadline);  // one for abandon()
        uint64_t at = head_;
        if (done == 0) {
          at = control_->put(put_frame(frame_of(message, kInParts), message), message.header);
          at = (at + 7) / 8 * 8;
        }
        publish(put_part(at, {kPartMagic, 0, own_.lease(slot), bytes}));
        done += bytes;
      }
    } catch (...) {
      if (done != 0 && !lost()) publish(put_part(head_, {kPartMagic, 1, {}, 0}));
      throw;
    }
    return true;
  }

  uint64_t put_part(uint64_t at, const SegmentPart& part) const {
    return control_->put(at, std::as_bytes(std::span(&part, 1)));
  }

  // A segment for the next part, or kSlots when the peer has returned none for a while, and what is left may be sent
  // without it.
  uint32_t find_part(uint64_t left, Deadline deadline) {
    uint32_t found = kSlots;
    const auto try_once = [&] {
      found = taken([&] { return own_.try_take_part(part_segment_bytes(), deadline); });
      return found != kSlots;
    };
    if (try_once() || !own_.has_parts()) return found;
    if (out_patience_.poll(Patience::kLooks, deadline, try_once)) return found;
    if (wait_for_peer(try_once, deadline.sooner(kStallS))) return found;
    if (padded(left) > options_.limits.max_segment_bytes)
      return find_segment([&] { return try_once(), found; }, deadline);
    return kSlots;
  }

  // --- receiving --------------------------------------------------------------------------------------------------

  Poll read_message(Message* message) override {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    uint64_t head = in_.head.load(std::memory_order_acquire);
    if (partial_.begun()) {
      const auto has_come = [&] { return (head = in_.head.load(std::memory_order_acquire)) != tail; };
      if (head == tail) in_patience_.poll(Patience::kLooks, Deadline::after(kStallS), has_come);
    }
    if (head == tail) {
      if (!check_socket_.exchange(false, std::memory_order_relaxed)) return Poll::nothing;
      const bool ended = !theirs_.read_notes();
      head = in_.head.load(std::memory_order_acquire);
      if (head == tail) {
        if (ended) partial_.drop();
        if (ended) fail(ErrorKind::peer_lost, "the peer over ", describe(), " is gone: it died, or hung up");
        return Poll::nothing;
      }
      if (ended) check_socket_.store(true, std::memory_order_relaxed);
    } else {
      // The ring explains why this thread is awake; any other event will not let the next sleep begin.
      check_socket_.store(false, std::memory_order_relaxed);
    }
    const uint64_t there = head - tail;
    if (partial_.begun()) return take_part(message, tail, there);
    FrameHeader frame{};
    if (there > kRingBytes || there < sizeof frame) fail(ErrorKind::frame, "the peer's ring is corrupt");
    uint64_t at = control_->get(tail, std::as_writable_bytes(std::span(&frame, 1)));
    check(frame, options_.limits, kInSegment | kHeaderInSegment | kInParts);
    const bool in_segment = (frame.flags & kInSegment) != 0;
    const bool header_too = (frame.flags & kHeaderInSegment) != 0;
    const bool in_parts = (frame.flags & kInParts) != 0;
    if ((header_too && !in_segment) || (in_parts && in_segment))
      fail(ErrorKind::frame, "the peer sent what is not a message");
    const uint64_t record = sizeof frame + 8 * uint64_t{frame.buffer_count} +
                            (in_parts     ? 0
                             : in_segment ? sizeof(SegmentPlace)
                                          : frame.payload_bytes) +
                            (header_too ? 0 : frame.header_bytes);
    if (record > there) fail(ErrorKind::frame, "the peer's ring holds less than a message");
    sizes_.resize(frame.buffer_count);
    at = control_->get(at, std::as_writable_bytes(std::span(sizes_)));
    check_sizes(frame, sizes_);
    message->tag = frame.tag;
    message->kind = frame.kind;
    if (!in_segment) {
      make_room(message, frame.header_bytes, sizes_);
      at = control_->get(at, message->header);
      if (in_parts) {
        partial_.begin(std::move(*message), frame.payload_bytes);
        *message = {};
        took(at);
        return Poll::more;
      }
      for (const auto& buffer : message->buffers) at = control_->get(at, buffer);
      count_received(Path::ring, frame.header_bytes + frame.payload_bytes);
    } else {
      SegmentPlace place{};
      at = control_->get(at, std::as_writable_bytes(std::span(&place, 1)));
      at = take_from_segment(message, frame, place, header_too, at);
    }
    took(at);
    return Poll::message;
  }

  void took(uint64_t at) {
    const uint64_t next = (at + 7) / 8 * 8;
    tail_.store(next, std::memory_order_relaxed);
    in_.tail.store(next, std::memory_order_release);
    control_->wake_if(in_.short_of_room);
  }

  Poll take_part(Message* message, uint64_t tail, uint64_t there) {
    SegmentPart part{};
    if (there > kRingBytes || there < sizeof part) fail(ErrorKind::frame, "the peer's ring is corrupt");
    const uint64_t at = control_->get(tail, std::as_writable_bytes(std::span(&part, 1)));
    if (part.magic != kPartMagic || part.abandoned > 1) fail(ErrorKind::frame, "the peer sent what is not a part");
    bool whole = false;
    if (part.abandoned != 0) {
      partial_.drop();
    } else {
      whole = partial_.add(part, *theirs_.find(part.place));
      in_.leased[part.place.slot].store(0, std::memory_order_release);
    }
    took(at);
    if (!whole) return Poll::more;
    *message = partial_.take();
    count_received(Path::segment, message->bytes());
    return Poll::message;
  }

  uint64_t take_from_segment(Message* message, const FrameHeader& frame, const SegmentPlace& place, bool header_too,
                             uint64_t at) {
    const std::shared_ptr<Memory> segment = theirs_.find(place);
    uint64_t needed = header_too ? padded(frame.header_bytes) : 0;
    for (const uint64_t size : sizes_) needed += padded(size);
    if (needed > segment->bytes()) fail(ErrorKind::frame, "the peer refers to bytes beyond its segment");

    std::byte* from = segment->data();
    const uint64_t total = frame.header_bytes + frame.payload_bytes;
    // Braces: clang 14 makes no aggregate of what stands in parentheses.
    std::shared_ptr<Lease> lease(new Lease{control_, segment, nullptr, viewed_bytes_, views_, place.slot, needed});
    const uint64_t views = views_->fetch_add(1, std::memory_order_relaxed);
    const uint64_t viewed = viewed_bytes_->fetch_add(needed, std::memory_order_relaxed);
    const bool view = options_.views && frame.payload_bytes >= kViewFrom && views < kMostViews &&
                      viewed + needed <= options_.limits.max_segment_bytes / 2;
    if (!view) {
      make_room(message, frame.header_bytes, sizes_);
      if (header_too) {
        copy_large(message->header.data(), from, frame.header_bytes);
        from += padded(frame.header_bytes);
      } else {
        at = control_->get(at, message->header);
      }
      for (const auto& buffer : message->buffers) {
        copy_large(buffer.data(), from, buffer.size());
        from += padded(buffer.size());
      }
      count_received(Path::segment, total);
      return at;  // the lease ends here
    }
    // The header is read more than once, so it is always a copy: the sender could change the leased memory.
    make_room(message, frame.header_bytes, {});
    if (header_too) {
      std::memcpy(message->header.data(), from, frame.header_bytes);
      from += padded(frame.header_bytes);
    } else {
      at = control_->get(at, message->header);
    }
    for (const uint64_t size : sizes_) {
      message->buffers.emplace_back(from, size);
      from += padded(size);
    }
    lease->header = std::move(message->owner);
    message->owner = std::move(lease);
    count_received(Path::view, total);
    return at;
  }

  const Descriptor socket_;
  const std::shared_ptr<ShmControl> control_;
  Direction& out_;
  Direction& in_;

  // The sender's, under its turn.
  uint64_t head_ = 0;
  uint64_t glanced_ns_ = 0;
  OwnSegments own_;
  Sequence<const std::byte> bytes_out_;
  Patience out_patience_{kPartSpinUs};
  uint64_t stalled_at_ = 0;  // the ring's position behind which the peer took no part for kStallS
  Descriptor sender_sleeper_;

  // The reader's, under its mutex.
  std::atomic<uint64_t> tail_{0};
  std::atomic<bool> check_socket_{true};
  std::vector<uint64_t> sizes_;
  PeerSegments theirs_;
  PartialMessage partial_;
  Patience in_patience_{kPartSpinUs};
  const std::shared_ptr<std::atomic<uint64_t>> viewed_bytes_ = std::make_shared<std::atomic<uint64_t>>(0);
  const std::shared_ptr<std::atomic<uint64_t>> views_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace

std::shared_ptr<Connection> make_shm(Descriptor socket, std::shared_ptr<ShmControl> control, Descriptor wake,
                                     Descriptor sideband, const Session& session, const Options& options) {
  return std::make_shared<ShmConnection>(std::move(socket), std::move(control), std::move(wake), std::move(sideband),
                                         session, options);
}

}  // namespace geartrain
