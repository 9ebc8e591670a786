// Peer: one member of a group as seen from another; frames over a link, non-blocking.
//
// Sending goes by turns. send_control() puts a small frame in front of everything; data is requested when there is room
// for it (Side::next), two frames at a time, so that the most urgent goes first and no more than a turn stands in the
// kernel's queue. Then it is the next peer's turn: all sockets of a group move on together.
//
// Receiving asks the side for the destination of a payload before it is read, so that numbers are read right into the
// array.
//
// One thread, the loop's. A peer is destroyed through EventLoop::discard.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "collectives/chunk_buffer.h"
#include "collectives/link.h"
#include "collectives/protocol.h"

namespace geartrain {

// A data frame in flight: `data` stays unchanged until it was sent, by `hold` or otherwise.
struct OutFrame {
  WireHeader header{};
  const std::byte* data = nullptr;
  ChunkBufferRef hold;
};

class Peer final : public EventLoop::Handler, public EventLoop::Pollable {
 public:
  class Side {
   public:
    virtual ~Side() = default;
    // The destination of a data frame's payload: header.bytes of memory, or none to be called again after resume().
    // Throws frame when it is not expected.
    virtual std::span<std::byte> room(Peer& peer, const WireHeader& header) = 0;
    // The same for a payload that is there already, in memory that the peer may change meanwhile: it is used at once,
    // and took() not called. False: it is needed longer.
    virtual bool used_in_place([[maybe_unused]] Peer& peer, [[maybe_unused]] const WireHeader& header,
                               [[maybe_unused]] std::span<const std::byte> payload) {
      return false;
    }
    // The frame is complete. Throws frame.
    virtual void took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) = 0;
    // The next data to send. False when there is none: kick() then.
    virtual bool next(Peer& peer, OutFrame* frame) = 0;
    // The peer is lost, or violated the protocol. No more calls for it after this.
    virtual void lost(Peer& peer, const std::string& why) = 0;
    // Something else failed while this peer was served: memory ran out, usually. Its stack has been unwound.
    virtual void failed(Peer& peer, const std::exception& error) noexcept = 0;
    // Memory of kChunkBytes for payloads that nobody wants.
    virtual std::span<std::byte> discard() noexcept = 0;
  };

  // `member` is the side's own number for it.
  Peer(EventLoop& loop, std::unique_ptr<Link> link, uint32_t member, Side& side);
  ~Peer() override { close(); }

  void send_control(FrameKind kind, uint64_t operation, uint64_t offset = 0, std::span<const std::byte> payload = {});
  // There may be data to send.
  void kick();
  void resume();
  // The memory of frames in flight is gone: the rest of what is sent becomes zeros, of what arrives is discarded.
  void blank() noexcept;
  void close();
  bool closed() const { return closed_; }
  // All queued frames and data have been written to the kernel or the ring.
  bool drained() const { return parts_.empty() && control_.empty(); }

  // Link's.
  bool reads_peer() const { return link_->reads_peer(); }
  bool read_denied() const { return link_->read_denied(); }
  ReadExposed still_exposes() const { return link_->still_exposes(); }
  ReadExposed read_exposed(uint64_t address, std::span<std::byte> into) const {
    return link_->read_exposed(address, into);
  }

  // Whether what is sent needs a network, and does not wait in memory that both have.
  bool remote() const { return !link_->polled(); }
  const char* transport() const { return link_->name(); }
  uint32_t member() const { return member_; }
  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }

  void ready(uint32_t events) override;
  bool look() override;
  bool announce_sleep(bool waited) override { return link_->announce_sleep(!paused_, waited); }
  void announce_wake() override { link_->announce_wake(); }
  void hold_wakes(bool hold) override { link_->hold_wakes(hold); }
  void send_wakes() override { link_->send_wakes(); }

 private:
  template <typename Act>
  void guarded(Act&& act);
  void handle(uint32_t events);
  bool pump_out(int turns);
  bool pump_in();
  bool fill();
  bool digest();
  bool use_in_place();
  void arm(bool writable);
  void lose(const std::string& why);

  EventLoop& loop_;
  const std::unique_ptr<Link> link_;
  const uint32_t member_;
  Side& side_;
  bool closed_ = false, stalled_ = false, armed_ = false, paused_ = false, pumping_ = false;

  // Outgoing: parts point into `sending_`, the frames' headers and their data.
  std::vector<std::byte> control_, sending_;
  std::array<OutFrame, 2> frames_;
  std::vector<struct iovec> parts_;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;

  // Incoming.
  WireHeader header_{};
  size_t header_filled_ = 0;
  bool in_payload_ = false;
  std::span<std::byte> payload_;
  size_t payload_filled_ = 0;
  std::array<std::byte, kMostControlBytes> small_;
  std::array<std::byte, kMostControlBytes> ahead_;
  size_t ahead_at_ = 0, ahead_end_ = 0;
};

}  // namespace geartrain
