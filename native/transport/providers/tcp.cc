// tcp: two processes with a network between them; frames (frame.h) on a stream, and big payloads over several streams.
//
// Lanes. A payload of kLanesFrom bytes and more is cut, all buffers one after the other, into pieces of kPiece bytes;
// piece i travels on lane i modulo their number, after the frame on the first connection, which stays idle until
// the payload is through. That gives the network several flows to spread over its links and queues. Without TLS one
// thread serves all lanes on either side, whichever is ready, and what a core can copy stays the limit on loopback.
// Under TLS payloads of kLanesFromUnderTls bytes and more take the lanes, which several threads encrypt and decrypt at
// once (lane_threads.h): the sender's, those that the sockets take something of; the receiver's, those where so much
// has come that a thread is worth waking (kWorthAThread).
//
// Reading never blocks: what has arrived is kept, in the buffer or in its place in the message, until the rest is
// there. So one thread can serve many peers, and a slow one delays no other (inbox.h). Payloads are read straight into
// memory of their own.
//
// A host that disappeared is detected by the heartbeats of the sideband (sideband.h), which is the last lane;
// where that is turned off, by keep-alive probes after about twenty seconds, and by unacknowledged data after thirty.

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>

#include "transport/providers/frame.h"
#include "transport/providers/lane_threads.h"
#include "transport/providers/provider.h"
#include "transport/providers/sequence.h"
#include "transport/security/handshake.h"
#include "transport/sideband/sideband.h"

namespace geartrain {
namespace {

constexpr uint64_t kLanesFrom = uint64_t{8} << 20;
constexpr uint64_t kLanesFromUnderTls = uint64_t{5} << 18;
constexpr uint64_t kPiece = uint64_t{1} << 20;
constexpr int kWorthAThread = 128 << 10;
constexpr double kLaneEndedS = 0.1, kSidebandEndedS = 1;
constexpr uint32_t kLookAtLanesEvery = 16;  // reads in vain
constexpr size_t kBufferBytes = size_t{256} << 10;
constexpr uint64_t kReadBudget = uint64_t{8} << 20;  // then other connections get their turn
constexpr size_t kGatherUpTo = 1024;                 // a copy takes less than a vector of parts in the kernel
constexpr size_t kMostParts = 64;                    // of one sendmsg or recvmsg

// Progress of one lane with a payload.
struct LaneProgress {
  uint64_t piece;
  uint64_t done;  // of it

  uint64_t at() const { return piece * kPiece + done; }
  uint64_t left(uint64_t payload) const { return at() >= payload ? 0 : std::min(kPiece - done, payload - at()); }
  void advance(uint64_t bytes, size_t lanes) {
    done += bytes;
    if (done == kPiece) {
      piece += lanes;
      done = 0;
    }
  }
};

std::string end_name(int socket, bool peer) {
  struct sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<struct sockaddr*>(&address);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if ((peer ? ::getpeername(socket, generic, &size) : ::getsockname(socket, generic, &size)) != 0 ||
      ::getnameinfo(generic, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  return std::string(host) + ":" + port;
}

class TcpConnection final : public Connection {
 public:
  TcpConnection(Stream socket, std::vector<Stream> lanes, const Session& session, const Options& options)
      : Connection(options, session.name(), session.authenticated),
        socket_(std::move(socket)),
        sideband_socket_(pop(&lanes)),
        lanes_(std::move(lanes)),
        out_threads_(lanes_.size(), socket_.tls() != nullptr, options.tls == nullptr ? 0 : options.tls->threads()),
        in_threads_(lanes_.size(), socket_.tls() != nullptr, options.tls == nullptr ? 0 : options.tls->threads()),
        buffer_(std::make_unique_for_overwrite<std::byte[]>(kBufferBytes)) {
    const bool heartbeats = static_cast<bool>(sideband_socket_);
    prepare_tcp(socket_.get(), heartbeats);
    if (heartbeats) prepare_tcp(sideband_socket_.get());
    for (const Stream& lane : lanes_) prepare_tcp(lane.get(), heartbeats);
    ends_ = end_name(socket_.get(), false) + " - " + end_name(socket_.get(), true);
    if (sideband_socket_) start_sideband(std::move(sideband_socket_), 0, "the peer is reached over TCP");
  }
  ~TcpConnection() override { stop_sideband(); }

  const char* transport() const override { return "tcp"; }
  std::string describe() const override {
    const auto threads = [](const LaneThreads& of) {
      return std::to_string(of.now()) + (of.now() == 1 ? " thread" : " threads") + " (at once so far " +
             std::to_string(of.seen()) + ")";
    };
    return "tcp " + ends_ + (lanes_.empty() ? "" : " with " + std::to_string(lanes_.size()) + " lanes") +
           (socket_.tls() == nullptr ? "" : ", " + tls()) +
           (out_threads_.most() == 1 ? ""
                                     : ", encrypted by " + threads(out_threads_) + " and decrypted by " +
                                           threads(in_threads_) + " of " + std::to_string(out_threads_.most()));
  }
  std::string tls() const override { return socket_.tls() == nullptr ? "" : socket_.tls()->describe(); }
  std::vector<Wake> wakes() const override {
    std::vector<Wake> all = {{wake_.get(), true}, {socket_.get(), false}};
    for (const Stream& lane : lanes_) all.push_back({lane.get(), false});
    return all;
  }
  int end_descriptor() const override { return socket_.get(); }

 protected:
  // The sockets stay readable while they hold data, and nothing whole is left in the buffer.
  bool prepare_to_sleep() override { return true; }
  bool took_all() const override { return took_all_.load(std::memory_order_relaxed); }

  void hang_up() override {
    ::shutdown(socket_.get(), SHUT_RDWR);
    for (const Stream& lane : lanes_) ::shutdown(lane.get(), SHUT_RDWR);
  }

  // --- sending ----------------------------------------------------------------------------------------------------

  void write_message(const Outgoing& message, Deadline deadline) override {
    const uint64_t payload = message.payload_bytes();
    const bool on_lanes = payload >= (out_threads_.most() > 1 ? kLanesFromUnderTls : kLanesFrom) && !lanes_.empty();
    const FrameHeader frame = frame_of(message, on_lanes ? kOnLanes : 0);
    sizes_out_.clear();
    for (const Bytes& buffer : message.buffers) sizes_out_.push_back(buffer.size());
    Sequence<const std::byte>& first = first_out_;
    first.clear();
    first.add(std::as_bytes(std::span(&frame, 1)));
    first.add(std::as_bytes(std::span(sizes_out_)));
    first.add(message.header);
    Sequence<const std::byte>& bulk = on_lanes ? bulk_out_ : first;
    if (on_lanes) bulk.clear();
    for (const Bytes& buffer : message.buffers) bulk.add(buffer);
    std::array<std::byte, kGatherUpTo> gathered;
    if (!on_lanes && first.bytes() <= gathered.size()) first.gather(gathered.data());

    bool begun = false;
    try {
      uint64_t sent = 0;
      while (sent != first.bytes()) {
        const uint64_t more = write_some(socket_, first, sent, first.bytes() - sent);
        if (more == 0) wait_writable(socket_, deadline);
        begun |= more != 0;
        sent += more;
      }
      if (on_lanes) write_lanes(bulk, deadline);
      finish({&socket_, 1}, deadline);
      finish(lanes_, deadline);
    } catch (const std::exception& error) {
      // Half a message cannot be undone.
      if (begun && !lost()) lose(error.what());
      throw;
    }
    count_sent(on_lanes ? Path::lanes : Path::stream, message.header.size() + payload);
  }

 private:
  void write_lanes(const Sequence<const std::byte>& bulk, Deadline deadline) {
    out_threads_.begin_message(bulk.bytes());
    std::vector<LaneProgress> progress;
    for (size_t i = 0; i < lanes_.size(); ++i) progress.push_back({i, 0});
    for (;;) {
      struct pollfd open[kMaxLanes];
      size_t lane_of[kMaxLanes], n = 0, ready = 0;
      for (size_t i = 0; i < lanes_.size(); ++i) {
        if (progress[i].left(bulk.bytes()) == 0) continue;
        open[n] = {lanes_[i].get(), POLLOUT, 0};
        lane_of[n++] = i;
      }
      if (n == 0) return;
      check_usable();
      if (::poll(open, n, 0) <= 0) wait_writable(std::span(open).first(n), deadline);
      for (size_t i = 0; i < n; ++i) {
        if (open[i].revents != 0) lane_of[ready++] = lane_of[i];
      }
      // Where every lane has a thread, that goes on with it; else each lane has its turn, a piece.
      const unsigned threads = out_threads_.now();
      const bool stays = ready == n && n > 1 && n <= threads;
      out_threads_.run(std::span(lane_of).first(ready), threads,
                       [&](size_t lane) { write_lane(lane, &progress[lane], bulk, stays); });
    }
  }

  // A piece, or all if it `stays`; less where the socket takes no more of it now. One thread that serves all lanes
  // keeps all of them busy, by as much as one call takes.
  void write_lane(size_t lane, LaneProgress* progress, const Sequence<const std::byte>& bulk, bool stays) {
    const bool one_thread = out_threads_.now() == 1;
    for (const uint64_t piece = progress->piece; stays || progress->piece == piece;) {
      const uint64_t left = progress->left(bulk.bytes());
      if (left == 0) return;
      const uint64_t sent = write_some(lanes_[lane], bulk, progress->at(), left);
      if (sent == 0 && !(stays && out_threads_.wait_briefly(lanes_[lane].get(), POLLOUT))) return;
      progress->advance(sent, lanes_.size());
      if (one_thread) return;
    }
  }

  // Under TLS what was accepted may not have been sent.
  void finish(std::span<const Stream> streams, Deadline deadline) {
    for (const Stream& stream : streams) {
      while (!stream.wire().flush()) wait_writable(stream, deadline);
    }
  }

  // Writes as much as the stream takes now.
  uint64_t write_some(const Stream& stream, const Sequence<const std::byte>& bytes, uint64_t at, uint64_t length) {
    struct iovec parts[kMostParts];
    const size_t n = bytes.vectors(at, length, parts, kMostParts);
    for (;;) {
      const ssize_t sent = stream.wire().send({parts, n});
      if (sent >= 0) return static_cast<uint64_t>(sent);
      if (errno == EAGAIN) return 0;
      if (errno != EINTR) {
        lose(std::string("the peer over ") + describe() + " is gone: " + std::strerror(errno));
        fail_lost();
      }
    }
  }

  void wait_writable(const Stream& stream, Deadline deadline) {
    struct pollfd one = {stream.get(), POLLOUT, 0};
    wait_writable({&one, 1}, deadline);
  }

  // Until one of them may be, for a moment.
  void wait_writable(std::span<struct pollfd> sockets, Deadline deadline) {
    check_usable();
    if (lost()) fail_lost();
    if (read_ahead()) return;
    if (deadline.passed())
      fail(ErrorKind::timed_out, "the peer over ", describe(), " took nothing before the deadline");
    // Polls now and then for what the peer sends, which may have to be read first.
    ::poll(sockets.data(), sockets.size(), std::min(5, deadline.left_ms()));
  }

  // --- receiving --------------------------------------------------------------------------------------------------

  Poll read_message(Message* message) override {
    uint64_t budget = kReadBudget;
    drained_ = lanes_drained_ = false;
    took_all_.store(false, std::memory_order_relaxed);
    for (;;) {
      if (!in_message_) begin_message();
      if (in_message_ && is_whole()) {
        in_message_ = false;
        *message = std::move(partial_);
        partial_ = {};
        count_received(on_lanes_ ? Path::lanes : Path::stream, message->bytes());
        // (TLS may hold what the socket does not report any more.)
        const bool all = drained_ && !on_lanes_ && buffered() == 0 && socket_.tls() == nullptr;
        took_all_.store(all, std::memory_order_relaxed);
        return Poll::message;
      }
      const bool on_lanes_now = in_message_ && first_done_ == first_in_.bytes();
      if (on_lanes_now ? lanes_drained_ : drained_) {
        if (!in_message_) look_at_idle_lanes();
        return Poll::nothing;
      }
      if (budget == 0) return Poll::more;
      if (on_lanes_now) {
        read_lanes(&budget);
      } else {
        read_first(&budget);
      }
    }
  }

  size_t buffered() const { return filled_ - taken_; }

  // A frame's beginning out of the buffer, if it is there whole.
  void begin_message() {
    FrameHeader frame{};
    if (buffered() < sizeof frame) return;
    std::memcpy(&frame, buffer_.get() + taken_, sizeof frame);
    check(frame, options_.limits, lanes_.empty() ? 0 : kOnLanes);
    const size_t needed = sizeof frame + 8 * size_t{frame.buffer_count};
    if (needed > kBufferBytes) fail(ErrorKind::frame, "the peer sent more buffers than can be");
    if (buffered() < needed) return;
    sizes_in_.resize(frame.buffer_count);
    if (frame.buffer_count != 0) {
      std::memcpy(sizes_in_.data(), buffer_.get() + taken_ + sizeof frame, 8 * size_t{frame.buffer_count});
    }
    check_sizes(frame, sizes_in_);
    taken_ += needed;
    partial_.tag = frame.tag;
    partial_.kind = frame.kind;
    make_room(&partial_, frame.header_bytes, sizes_in_);
    on_lanes_ = (frame.flags & kOnLanes) != 0;
    first_in_.clear();
    first_in_.add(partial_.header);
    bulk_in_.clear();
    for (const auto& buffer : partial_.buffers) (on_lanes_ ? bulk_in_ : first_in_).add(buffer);
    first_done_ = 0;
    bulk_left_ = bulk_in_.bytes();
    progress_in_.clear();
    for (size_t i = 0; i < lanes_.size(); ++i) progress_in_.push_back({i, 0});
    if (on_lanes_) in_threads_.begin_message(bulk_in_.bytes());
    in_message_ = true;
  }

  // Takes what is in the buffer.
  bool is_whole() {
    while (buffered() != 0 && first_done_ != first_in_.bytes()) {
      struct iovec part{};
      first_in_.vectors(first_done_, buffered(), &part, 1);
      std::memcpy(part.iov_base, buffer_.get() + taken_, part.iov_len);
      taken_ += part.iov_len;
      first_done_ += part.iov_len;
    }
    return first_done_ == first_in_.bytes() && bulk_left_ == 0;
  }

  // One read of the first connection: into the message's place, and what comes after it into the buffer.
  void read_first(uint64_t* budget) {
    if (taken_ != 0) {
      std::memmove(buffer_.get(), buffer_.get() + taken_, buffered());
      filled_ -= taken_;
      taken_ = 0;
    }
    struct iovec parts[kMostParts];
    size_t n = 0;
    uint64_t wanted = 0;
    if (in_message_) {
      const uint64_t left = first_in_.bytes() - first_done_;
      n = first_in_.vectors(first_done_, std::min(left, *budget), parts, kMostParts - 1);
      for (size_t i = 0; i < n; ++i) wanted += parts[i].iov_len;
    }
    const bool to_the_end = !in_message_ || first_done_ + wanted == first_in_.bytes();
    if (to_the_end) parts[n++] = {buffer_.get() + filled_, kBufferBytes - filled_};
    const uint64_t got = read_some(socket_, {parts, n}, &drained_);
    *budget -= std::min(*budget, got);
    const uint64_t placed = std::min(got, wanted);
    first_done_ += placed;
    filled_ += got - placed;
  }

  // A lane that ends while nothing is expected on it is the end of the connection, when what may have been sent on the
  // first one before has had time to come. Looked for now and then: whoever waits is woken by such a lane again and
  // again. So is the sideband, whose end wakes whoever waits at every heartbeat.
  void look_at_idle_lanes() {
    if (sideband_ != nullptr && sideband_->ended_by_peer()) {
      if (!sideband_ended_) sideband_ended_ = Deadline::after(kSidebandEndedS);
      if (sideband_ended_->passed()) {
        fail(ErrorKind::peer_lost, "the peer over ", describe(), " is gone: its sideband has ended");
      }
    }
    if (++empty_reads_ % kLookAtLanesEvery != 0 || lanes_.empty()) return;
    struct pollfd all[kMaxLanes];
    size_t n = 0;
    for (const Stream& lane : lanes_) all[n++] = {lane.get(), POLLRDHUP, 0};
    if (::poll(all, n, 0) <= 0) return;
    if (!lane_ended_) lane_ended_ = Deadline::after(kLaneEndedS);
    if (lane_ended_->passed()) fail(ErrorKind::peer_lost, "the peer over ", describe(), " is gone: a lane has ended");
  }

  void read_lanes(uint64_t* budget) {
    size_t open[kMaxLanes], n = 0;
    unsigned worth = 0;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (progress_in_[i].left(bulk_in_.bytes()) == 0) continue;
      open[n++] = i;
      worth += in_threads_.now() > 1 && come(lanes_[i]) >= kWorthAThread ? 1 : 0;
    }
    const unsigned threads = std::clamp(worth, 1u, in_threads_.now());
    struct Read {
      uint64_t bytes = 0;
      bool drained = false;
    } read[kMaxLanes];
    const uint64_t most = threads == 1 ? 1 : std::max(kPiece, *budget * threads / n);  // one: a call each
    const bool stays = threads == n && n > 1;
    in_threads_.run(std::span(open).first(n), threads, [&](size_t lane) {
      Read& of = read[lane];
      LaneProgress& progress = progress_in_[lane];
      while (!of.drained && of.bytes < most) {
        const uint64_t left = progress.left(bulk_in_.bytes());
        if (left == 0) break;
        struct iovec parts[kMostParts];
        const size_t count = bulk_in_.vectors(progress.at(), left, parts, kMostParts);
        const uint64_t got = read_some(lanes_[lane], {parts, count}, &of.drained);
        progress.advance(got, lanes_.size());
        of.bytes += got;
        if (of.drained && stays && in_threads_.wait_briefly(lanes_[lane].get(), POLLIN)) of.drained = false;
      }
    });
    uint64_t bytes = 0;
    bool all_drained = true;
    for (size_t i = 0; i < n; ++i) {
      bytes += read[open[i]].bytes;
      all_drained &= read[open[i]].drained || progress_in_[open[i]].left(bulk_in_.bytes()) == 0;
    }
    bulk_left_ -= bytes;
    lanes_drained_ = all_drained;
    *budget -= std::min(*budget, bytes / threads);
  }

  // Bytes that a socket has for its reader.
  static int come(const Stream& stream) {
    int bytes = 0;
    return ::ioctl(stream.get(), FIONREAD, &bytes) == 0 ? bytes : 0;
  }

  // What has come, as much as fits; `drained`: there was less than that. Several lanes at once.
  uint64_t read_some(const Stream& stream, std::span<struct iovec> parts, bool* drained) {
    uint64_t room = 0;
    for (const struct iovec& part : parts) room += part.iov_len;
    for (;;) {
      const ssize_t got = stream.wire().receive(parts);
      if (got > 0) {
        *drained = static_cast<uint64_t>(got) < room;
        return static_cast<uint64_t>(got);
      }
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) {
        *drained = true;
        return 0;
      }
      const std::string why = got == 0 ? "it died, or hung up" : std::strerror(errno);
      fail(ErrorKind::peer_lost, "the peer over ", describe(), " is gone",
           in_message_ ? " in the middle of a message" : "", ": ", why);
    }
  }

  static Stream pop(std::vector<Stream>* lanes) {
    if (lanes->empty()) return {};
    Stream last = std::move(lanes->back());
    lanes->pop_back();
    return last;
  }

  const Stream socket_;
  Stream sideband_socket_;  // until the sideband has it
  const std::vector<Stream> lanes_;
  LaneThreads out_threads_, in_threads_;  // the sender's and the reader's
  std::string ends_;

  // The sender's, under its turn.
  std::vector<uint64_t> sizes_out_;
  Sequence<const std::byte> first_out_, bulk_out_;

  // The reader's, under its mutex.
  const std::unique_ptr<std::byte[]> buffer_;
  size_t taken_ = 0, filled_ = 0;
  bool in_message_ = false, on_lanes_ = false, drained_ = false, lanes_drained_ = false;
  std::atomic<bool> took_all_{false};  // with the last message
  Message partial_;
  std::vector<uint64_t> sizes_in_;
  Sequence<std::byte> first_in_, bulk_in_;  // received on the first connection, and on the lanes
  uint64_t first_done_ = 0, bulk_left_ = 0;
  uint32_t empty_reads_ = 0;
  std::optional<Deadline> lane_ended_, sideband_ended_;
  std::vector<LaneProgress> progress_in_;
};

}  // namespace

std::shared_ptr<Connection> take_tcp(Stream socket, std::vector<Stream> lanes, const Session& session,
                                     const Options& options) {
  return std::make_shared<TcpConnection>(std::move(socket), std::move(lanes), session, options);
}

}  // namespace geartrain
