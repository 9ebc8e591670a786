#include "transport/sideband/sideband.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/sha256.h"

namespace geartrain {
namespace {

constexpr uint64_t kChunk = uint64_t{1} << 20;
constexpr uint64_t kBudget = uint64_t{4} << 20;      // of one sideband, until the others get their turn
constexpr uint64_t kTakePiece = uint64_t{16} << 20;  // a region cannot be closed for so long
constexpr size_t kMostNotes = 1024;                  // that a peer does not read

}  // namespace

Sideband::Sideband(Setup setup)
    : socket_(std::move(setup.socket)),
      peer_(setup.peer),
      peer_timeout_s_(setup.peer_timeout_s),
      regions_(std::move(setup.regions)),
      lost_(std::move(setup.lost)),
      on_ended_(std::move(setup.ended)),
      out_of_reach_(std::move(setup.out_of_reach)) {
  random_bytes(nonce_);
  if (peer_ == 0) {
    greeted_ = reach_known_ = true;  // and nothing to wait for
  } else {
    out_of_reach_.clear();  // until it is known
  }
}

void Sideband::start() {
  SidebandThread::of_process().add(shared_from_this());
  std::lock_guard lock(mutex_);
  Note note{};
  note.kind = static_cast<uint32_t>(NoteKind::greeting);
  note.region = nonce_;
  if (peer_ != 0) note.data = reinterpret_cast<uintptr_t>(nonce_.data());
  notes_.push_back(note);
  flush();
  unread_.store(socket_.wire().unread(), std::memory_order_relaxed);  // it may have arrived with the handshake
  SidebandThread::of_process().wake();
}

void Sideband::stop() {
  if (owned_.forked()) return;
  {
    std::lock_guard lock(lost_mutex_);
    lost_ = nullptr;
    on_ended_ = nullptr;
  }
  hang_up();
  SidebandThread::of_process().remove(this);
}

void Sideband::hang_up() const {
  if (!owned_.forked()) ::shutdown(socket_.get(), SHUT_RDWR);
}

// --- incoming -------------------------------------------------------------------------------------------------------

void Sideband::on_ready() {
  std::lock_guard lock(mutex_);
  unread_.store(false, std::memory_order_relaxed);
  uint64_t budget = kBudget;
  try {
    while (!ended_ && budget != 0) {
      if (payload_left_ != 0) {
        if (!read_payload(&budget)) break;
        continue;
      }
      auto* at = reinterpret_cast<std::byte*>(&in_);
      const ssize_t got = socket_.wire().receive(at + in_filled_, sizeof in_ - in_filled_);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) break;
      if (got <= 0) {
        end_by_peer();
        break;
      }
      received_ = true;
      in_filled_ += static_cast<size_t>(got);
      budget -= std::min<uint64_t>(budget, static_cast<uint64_t>(got));
      if (in_filled_ < sizeof in_) continue;
      in_filled_ = 0;
      handle(in_);
    }
    unread_.store(!ended_ && socket_.wire().unread(), std::memory_order_relaxed);
    flush();
  } catch (const std::exception& error) {
    end();
    report_lost(error.what());
  }
}

void Sideband::fail_line(const std::string& why) noexcept {
  std::lock_guard lock(mutex_);
  end();
  report_lost(why);
}

// False when nothing more has arrived.
bool Sideband::read_payload(uint64_t* budget) {
  ssize_t got = 0;
  int error = 0;
  bool used = false;
  if (payload_for_ != nullptr) {
    used = payload_for_->use(payload_at_, payload_left_, [&](std::span<std::byte> into) {
      got = socket_.wire().receive(into.data(), into.size());
      error = errno;
    });
    if (!used) payload_for_.reset();  // closed meanwhile: its owner is informed when the chunk is through
  }
  if (!used) {
    std::byte nowhere[16384];
    got = socket_.wire().receive(nowhere, std::min<uint64_t>(sizeof nowhere, payload_left_));
    error = errno;
  }
  if (got < 0 && error == EINTR) return true;
  if (got < 0 && error == EAGAIN) return false;
  if (got <= 0) {
    end_by_peer();
    return false;
  }
  received_ = true;
  const auto bytes = static_cast<uint64_t>(got);
  payload_left_ -= bytes;
  payload_at_ += bytes;
  *budget -= std::min(*budget, bytes);
  if (payload_left_ == 0) {
    const auto put = in_.kind == static_cast<uint32_t>(NoteKind::load) ? puts_.find(in_.number) : puts_.end();
    if (put != puts_.end()) {
      put->second.got += in_.bytes;
      const bool closed = payload_for_ == nullptr;
      if (closed || put->second.got == put->second.bytes) {
        send_note(NoteKind::done, in_.number, closed ? Access::closed : Access::ok);
        puts_.erase(put);
      }
    }
    payload_for_.reset();
  }
  return true;
}

void Sideband::handle(const Note& note) {
  if (notes_.size() >= kMostNotes) malformed("requests, and reads no answers");
  switch (static_cast<NoteKind>(note.kind)) {
    case NoteKind::beat:
      return;
    case NoteKind::greeting:
      return greeted(note);
    case NoteKind::reach:
      reach_known_ = true;
      peer_reaches_ = peer_ != 0 && note.access == 0;
      greeting_.notify_all();
      return;
    case NoteKind::get:
    case NoteKind::put:
    case NoteKind::take:
      return requested(note);
    case NoteKind::chunk:
    case NoteKind::load:
      return arriving(note);
    case NoteKind::done: {
      if (note.access >= kAccessCount) malformed("an answer that does not exist");
      std::erase_if(transfers_, [&](const Transfer& t) { return t.kind == NoteKind::load && t.number == note.number; });
      const auto found = requests_.find(note.number);
      if (found == requests_.end()) return;
      found->second->done = true;
      found->second->access = static_cast<Access>(note.access);
      found->second->changed.notify_one();
      return;
    }
    case NoteKind::cancel:
      puts_.erase(note.number);
      std::erase_if(transfers_,
                    [&](const Transfer& t) { return t.kind == NoteKind::chunk && t.number == note.number; });
      std::erase_if(takes_, [&](const Take& take) { return take.number == note.number; });
      return;
  }
  malformed("what is not a note");
}

void Sideband::greeted(const Note& note) {
  if (peer_ != 0 && !greeted_) {
    ExposedId found{};
    if (note.data == 0) {
      out_of_reach_ = "the peer has turned it off";
    } else if (const int error = peek(peer_, note.data, std::as_writable_bytes(std::span(found))); error != 0) {
      out_of_reach_ = std::string("the peer's memory cannot be read: ") + std::strerror(error);
    } else if (found != note.region) {
      out_of_reach_ = "another process has the peer's pid";
    }
  }
  greeted_ = true;
  greeting_.notify_all();
  send_note(NoteKind::reach, 0, out_of_reach_.empty() ? Access::ok : Access::out_of_reach);
}

void Sideband::requested(const Note& note) {
  if (puts_.size() + transfers_.size() + takes_.size() > 2 * kMostOpen) malformed("too many requests");
  const bool writing = static_cast<NoteKind>(note.kind) != NoteKind::get;
  const auto region = regions_->find(note.region);
  Access access = Access::closed;
  if (region != nullptr && !region->closed()) access = allowed(region->handle(), note.offset, note.bytes, writing);
  if (static_cast<NoteKind>(note.kind) == NoteKind::take && access == Access::ok && !out_of_reach_.empty()) {
    access = Access::out_of_reach;
  }
  if (access != Access::ok || note.bytes == 0) return send_note(NoteKind::done, note.number, access);
  if (static_cast<NoteKind>(note.kind) == NoteKind::get) {
    transfers_.push_back({NoteKind::chunk, note.number, region, note.offset, note.bytes, 0});
  } else if (static_cast<NoteKind>(note.kind) == NoteKind::put) {
    if (!puts_.try_emplace(note.number, Put{region, note.offset, note.bytes, 0}).second) malformed("a number twice");
  } else {
    RegionHandle from{};
    from.id = note.from;
    from.stamp = note.stamp;
    from.data = note.data;
    from.bytes = note.bytes;
    takes_.push_back({note.number, region, note.offset, 0, from});
    has_work_.store(true, std::memory_order_relaxed);
  }
}

// Bytes follow: for a read of ours, or for a region of ours. Those without a destination are read and discarded.
void Sideband::arriving(const Note& note) {
  if (note.bytes == 0 || note.bytes > kChunk) malformed("a chunk of a size that cannot be");
  payload_left_ = note.bytes;
  payload_at_ = note.offset;
  payload_for_.reset();
  if (static_cast<NoteKind>(note.kind) == NoteKind::chunk) {
    const auto found = requests_.find(note.number);
    if (found == requests_.end() || !found->second->incoming) return;
    const auto& local = found->second->local;
    if (note.offset > local->bytes() || note.bytes > local->bytes() - note.offset) malformed("more than was asked for");
    payload_for_ = local;
    return;
  }
  const auto found = puts_.find(note.number);
  if (found == puts_.end()) return;
  const Put& put = found->second;
  if (note.offset != put.got || note.bytes > put.bytes - put.got) malformed("other bytes than it announced");
  payload_at_ = put.offset + note.offset;
  payload_for_ = put.region;
}

// A piece at a time, so that heartbeats go on and regions can be closed.
void Sideband::work() {
  if (unread_.load(std::memory_order_relaxed)) on_ready();
  Take take;
  {
    std::lock_guard lock(mutex_);
    if (takes_.empty() || ended_) {
      has_work_.store(false, std::memory_order_relaxed);
      return;
    }
    take = takes_.front();
  }
  const uint64_t bytes = std::min(kTakePiece, take.from.bytes - take.done);
  Access access = Access::closed;
  take.region->use(take.offset + take.done, bytes,
                   [&](std::span<std::byte> into) { access = read_across(peer_, take.from, take.done, into); });
  std::lock_guard lock(mutex_);
  if (!takes_.empty() && takes_.front().number == take.number) {  // else it was withdrawn
    takes_.front().done += bytes;
    if (access != Access::ok || takes_.front().done == take.from.bytes) {
      takes_.pop_front();
      send_note(NoteKind::done, take.number, access);
    }
  }
  has_work_.store(!takes_.empty(), std::memory_order_relaxed);
  flush();
}

// --- outgoing -------------------------------------------------------------------------------------------------------

void Sideband::send_note(NoteKind kind, uint64_t number, Access access) {
  Note note{};
  note.kind = static_cast<uint32_t>(kind);
  note.number = number;
  note.access = static_cast<uint32_t>(access);
  notes_.push_back(note);
}

// Does not throw: a caller may have registered what is on its stack. What cannot be written ends the sideband (under
// TLS a write throws what the peer refuses), and with it the connection; whoever waits sees that.
void Sideband::flush() noexcept {
  try {
    write_all();
  } catch (const std::exception& error) {
    end();
    report_lost(error.what());
  }
}

// Writes as much as the socket takes, and the budget allows; the thread goes on when there is room again.
void Sideband::write_all() {
  uint64_t chunks = kBudget / kChunk;
  while (!ended_) {
    if (out_sent_ != out_.size()) {
      const int more = chunk_left_ != 0 ? MSG_MORE : 0;
      const ssize_t n = socket_.wire().send(out_.data() + out_sent_, out_.size() - out_sent_, more);
      if (n > 0) out_sent_ += static_cast<size_t>(n);
      if (n <= 0 && !again()) return;
    } else if (chunk_left_ != 0) {
      if (!send_payload() && !again()) return;
    } else if (!notes_.empty()) {
      out_.clear();
      out_sent_ = 0;
      for (; !notes_.empty() && out_.size() < 32 * sizeof(Note); notes_.pop_front()) {
        const auto* begin = reinterpret_cast<const std::byte*>(&notes_.front());
        out_.insert(out_.end(), begin, begin + sizeof(Note));
      }
    } else if (!transfers_.empty()) {
      if (chunks-- == 0) return want_write(true);
      begin_chunk();
    } else {
      return want_write(!socket_.wire().flush());
    }
  }
}

// The next chunk of the request that waits longest.
void Sideband::begin_chunk() {
  chunk_ = std::move(transfers_.front());
  transfers_.pop_front();
  chunk_spoilt_ = chunk_.region->closed();
  chunk_left_ = chunk_spoilt_ ? 0 : std::min(kChunk, chunk_.bytes - chunk_.sent);
  if (chunk_left_ == 0) return end_chunk();
  Note note{};
  note.kind = static_cast<uint32_t>(chunk_.kind);
  note.number = chunk_.number;
  note.offset = chunk_.sent;
  note.bytes = chunk_left_;
  const auto* begin = reinterpret_cast<const std::byte*>(&note);
  out_.assign(begin, begin + sizeof note);
  out_sent_ = 0;
}

// False when the socket took nothing. A chunk was announced: bytes of a region closed meanwhile go as zeros.
bool Sideband::send_payload() {
  ssize_t n = 0;
  int error = 0;
  const bool used = chunk_.region->use(chunk_.offset + chunk_.sent, chunk_left_, [&](std::span<std::byte> from) {
    n = socket_.wire().send(from.data(), from.size());
    error = errno;
  });
  if (!used) {
    static constexpr std::array<std::byte, 16384> zeros{};
    chunk_spoilt_ = true;
    n = socket_.wire().send(zeros.data(), std::min<uint64_t>(zeros.size(), chunk_left_));
    error = errno;
  }
  errno = error;
  if (n <= 0) return false;
  chunk_left_ -= static_cast<uint64_t>(n);
  chunk_.sent += static_cast<uint64_t>(n);
  if (chunk_left_ == 0) end_chunk();
  return true;
}

void Sideband::end_chunk() {
  const bool last = chunk_spoilt_ || chunk_.sent == chunk_.bytes;
  if (!last) {
    transfers_.push_back(std::move(chunk_));
  } else if (chunk_.kind == NoteKind::chunk) {
    send_note(NoteKind::done, chunk_.number, chunk_spoilt_ ? Access::closed : Access::ok);
  }
  chunk_ = {};
}

// After a send that sent nothing: whether to retry now.
bool Sideband::again() {
  if (errno == EINTR) return true;
  if (errno == EAGAIN) {
    want_write(true);
  } else {
    end();
  }
  return false;
}

void Sideband::want_write(bool wanted) {
  if (wanted == wants_write_) return;
  wants_write_ = wanted;
  SidebandThread::of_process().watch(this, wanted);
}

// --- heartbeats and loss --------------------------------------------------------------------------------------------

void Sideband::tick() {
  std::lock_guard lock(mutex_);
  if (ended_by_peer()) {
    std::lock_guard one(lost_mutex_);
    if (on_ended_) on_ended_();
  }
  if (ended_) return;  // the connection itself reports that
  // Counted in heartbeats of this process: one that was stopped itself does not declare its peers lost.
  idle_s_ = received_ ? 0 : idle_s_ + kHeartbeatS;
  received_ = false;
  if (peer_timeout_s_ > 0 && idle_s_ >= peer_timeout_s_) {
    end();
    return report_lost(
        message_of({"has sent no heartbeat for ", idle_s_, " s: its process is stopped, or the network to it is cut"}));
  }
  if (notes_.empty()) send_note(NoteKind::beat);
  flush();
}

// It stays with the thread, for its heartbeats: a connection whose sideband ended alone has no others.
void Sideband::end_by_peer() noexcept {
  if (ended_) return;
  ended_by_peer_.store(true, std::memory_order_relaxed);
  SidebandThread::of_process().unwatch(this);
  end();
}

void Sideband::end() noexcept {
  if (ended_) return;
  ended_ = true;
  if (!ended_by_peer()) SidebandThread::of_process().remove(this);
  for (auto& [number, request] : requests_) request->changed.notify_one();
  greeting_.notify_all();
  puts_.clear();
  takes_.clear();
  transfers_.clear();
  notes_.clear();
  chunk_ = {};
  chunk_left_ = 0;
  payload_for_.reset();
}

void Sideband::malformed(const char* what) {
  fail(ErrorKind::frame, "sent ", what, " on the sideband");
}

void Sideband::report_lost(const std::string& reason) noexcept {
  std::lock_guard lock(lost_mutex_);
  try {
    if (lost_) lost_(reason);
  } catch (const std::exception&) {
    // No memory for the text: the connection's socket reports the end without it.
    hang_up();
  }
}

}  // namespace geartrain
