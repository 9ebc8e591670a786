#include "collectives/peer.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace geartrain {
namespace {

constexpr size_t kMostControlQueued = 1 << 20;
constexpr size_t kPeerReadBudget = 256 << 10;  // of one peer, before the others' turn

const std::byte kZeros[kChunkBytes] = {};

}  // namespace

Peer::Peer(EventLoop& loop, std::unique_ptr<Link> link, uint32_t member, Side& side)
    : loop_(loop), link_(std::move(link)), member_(member), side_(side) {
  parts_.reserve(5);
  link_->time_by(&loop_.stages());
  if (link_->polled()) loop_.add(this);
  try {
    loop_.watch(link_->socket(), EPOLLIN | EPOLLRDHUP, this);
  } catch (...) {
    if (link_->polled()) loop_.remove(this);
    throw;
  }
}

void Peer::close() {
  if (closed_) return;
  closed_ = true;
  loop_.unwatch(link_->socket());
  if (link_->polled()) loop_.remove(this);
}

void Peer::lose(const std::string& why) {
  if (closed_) return;
  close();
  side_.lost(*this, why);
}

// --- sending --------------------------------------------------------------------------------------------------------

void Peer::send_control(FrameKind kind, uint64_t operation, uint64_t offset, std::span<const std::byte> payload) {
  if (closed_ || stalled_) return;
  const WireHeader header = frame_of(kind, operation, offset, payload.size());
  const auto bytes = std::as_bytes(std::span(&header, 1));
  control_.insert(control_.end(), bytes.begin(), bytes.end());
  control_.insert(control_.end(), payload.begin(), payload.end());
  if (control_.size() > kMostControlQueued) stalled_ = true;  // it reads nothing: deadlines will name it
}

void Peer::kick() {
  // While it waits for room, or is in the middle of sending, more is requested anyway.
  if (!armed_ && !pumping_) pump_out(1);
}

void Peer::arm(bool writable) {
  if (armed_ == writable) return;
  armed_ = writable;
  if (!link_->polled()) loop_.change(link_->socket(), EPOLLIN | EPOLLRDHUP | (writable ? EPOLLOUT : 0u), this);
}

// The next turn's parts. False when there is nothing to send.
bool Peer::fill() {
  parts_.clear();
  for (OutFrame& frame : frames_) frame = {};
  sending_.clear();
  size_t n = 0;
  while (n < frames_.size() && side_.next(*this, &frames_[n])) ++n;
  sending_.swap(control_);  // after the request: an operation is opened in front of its first part
  if (!sending_.empty()) parts_.push_back({sending_.data(), sending_.size()});
  for (size_t i = 0; i < n; ++i) {
    OutFrame& frame = frames_[i];
    parts_.push_back({&frame.header, sizeof frame.header});
    if (frame.header.bytes != 0) parts_.push_back({const_cast<std::byte*>(frame.data), frame.header.bytes});
  }
  return !parts_.empty();
}

// Sends up to so many turns. True when something went.
bool Peer::pump_out(int turns) {
  if (closed_ || stalled_) return false;
  // Whatever is thrown.
  struct Pumping {
    bool& flag;
    explicit Pumping(bool& on) : flag(on) { flag = true; }
    ~Pumping() { flag = false; }
  };
  std::optional<Pumping> pumping(pumping_);
  bool any = false;
  bool more = !parts_.empty() || fill();
  while (more && turns > 0) {
    size_t sent = 0;
    try {
      sent = link_->write(parts_);
    } catch (const Error&) {
      stalled_ = true;  // its last frames are still to be read, and give the reason
      more = false;
      break;
    }
    if (sent == 0) break;
    any = true;
    bytes_sent_ += sent;
    while (sent > 0) {
      struct iovec& first = parts_.front();
      const size_t n = std::min(sent, first.iov_len);
      first.iov_base = static_cast<std::byte*>(first.iov_base) + n;
      first.iov_len -= n;
      sent -= n;
      if (first.iov_len == 0) parts_.erase(parts_.begin());
    }
    if (!parts_.empty()) break;
    --turns;
    more = fill();
  }
  pumping.reset();
  arm(more);
  return any;
}

void Peer::blank() noexcept {
  link_->take_back();
  for (OutFrame& frame : frames_) {
    for (struct iovec& part : parts_) {
      const auto* const at = static_cast<const std::byte*>(part.iov_base);
      if (frame.data != nullptr && at >= frame.data && at < frame.data + frame.header.bytes) {
        part.iov_base = const_cast<std::byte*>(kZeros);
      }
    }
    frame.hold = {};
    frame.data = nullptr;
  }
  if (in_payload_ && is_data(header_)) {
    payload_ = side_.discard().first(header_.bytes);
  }
}

// --- receiving ------------------------------------------------------------------------------------------------------

void Peer::resume() {
  if (!paused_ || closed_) return;
  paused_ = false;
  if (!link_->polled()) loop_.change(link_->socket(), EPOLLIN | EPOLLRDHUP | (armed_ ? EPOLLOUT : 0u), this);
  pump_in();
}

// Delivers a part that waits in a ring, and was not copied out of it.
bool Peer::use_in_place() {
  if (ahead_at_ != ahead_end_ || header_.kind != static_cast<uint16_t>(FrameKind::part) || header_.bytes == 0)
    return false;
  const std::span<const std::byte> there = link_->in_place(header_.bytes);
  if (there.empty() || !side_.used_in_place(*this, header_, there)) return false;
  link_->skip(there.size());
  bytes_received_ += there.size();
  header_filled_ = 0;
  return true;
}

// Parses `ahead_`, frame by frame. False when the peer is closed, or waits for room.
bool Peer::digest() {
  for (;;) {
    if (!in_payload_) {
      const size_t n = std::min(sizeof header_ - header_filled_, ahead_end_ - ahead_at_);
      std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_filled_, ahead_.data() + ahead_at_, n);
      header_filled_ += n;
      ahead_at_ += n;
      if (header_filled_ < sizeof header_) return true;
      check(header_);
      if (use_in_place()) {
        if (closed_) return false;
        continue;
      }
      payload_ = is_data(header_) ? side_.room(*this, header_) : std::span(small_).first(header_.bytes);
      if (closed_) return false;
      if (payload_.size() < header_.bytes) {
        paused_ = true;
        if (!link_->polled()) loop_.change(link_->socket(), EPOLLRDHUP | (armed_ ? EPOLLOUT : 0u), this);
        return false;
      }
      payload_ = payload_.first(header_.bytes);
      in_payload_ = true;
      payload_filled_ = 0;
    }
    const size_t n = std::min(payload_.size() - payload_filled_, ahead_end_ - ahead_at_);
    if (n != 0) std::memcpy(payload_.data() + payload_filled_, ahead_.data() + ahead_at_, n);
    payload_filled_ += n;
    ahead_at_ += n;
    if (payload_filled_ < payload_.size()) return true;
    in_payload_ = false;
    header_filled_ = 0;
    side_.took(*this, header_, payload_);
    if (closed_) return false;
  }
}

// Reads what has arrived, up to a budget. True when there was something.
bool Peer::pump_in() {
  bool any = false;
  try {
    struct Freeing {
      Link& link;
      ~Freeing() { link.free_read(); }
    } const freeing{*link_};
    // While it waits for room, `header_` holds its header, and no more than that.
    if (closed_ || paused_ || !digest()) return false;
    for (size_t budget = kPeerReadBudget; budget > 0;) {
      const size_t wanted = in_payload_ ? payload_.size() - payload_filled_ : 0;
      // Only the next header is read ahead where that costs no system call, and behind a large payload: so that numbers
      // are not copied twice.
      const bool header_only = link_->polled() || wanted >= kMostControlBytes / 2;
      const size_t beyond = header_only ? sizeof header_ : ahead_.size();
      struct iovec parts[2] = {{payload_.data() + payload_filled_, wanted}, {ahead_.data(), beyond}};
      const size_t got = link_->read(wanted != 0 ? std::span(parts) : std::span(parts).last(1));
      if (got == 0) break;
      any = true;
      bytes_received_ += got;
      const size_t placed = std::min(got, wanted);
      payload_filled_ += placed;
      ahead_at_ = 0;
      ahead_end_ = got - placed;
      if (!digest()) return any;
      budget -= std::min(budget, got);
      if (got < wanted + beyond && !link_->polled()) break;
    }
  } catch (const Error& error) {
    lose(error.what());
  }
  return any;
}

template <typename Act>
void Peer::guarded(Act&& act) {
  try {
    act();
  } catch (const std::exception& error) {
    side_.failed(*this, error);
  }
}

void Peer::ready(uint32_t events) {
  guarded([&] { handle(events); });
}

void Peer::handle(uint32_t events) {
  if (closed_) return;
  if (link_->polled()) {
    link_->end();  // nothing else comes through the socket
    loop_.unwatch(link_->socket());
    look();
    return;
  }
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    if (paused_ && (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) return lose("connection closed");
    pump_in();
  }
  if (!closed_ && (events & EPOLLOUT) != 0) pump_out(1);
}

bool Peer::look() {
  bool any = false;
  guarded([&] {
    if (closed_) return;
    any = pump_in();
    if (!closed_ && armed_) any |= pump_out(4);
  });
  return any;
}

}  // namespace geartrain
