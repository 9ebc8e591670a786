// Requests of a sideband: one-sided reads and writes of the peer's regions, by the calling thread.
#include <algorithm>
#include <cstring>

#include "transport/sideband/sideband.h"

namespace geartrain {

Path Sideband::read(const RegionHandle& handle, std::span<std::byte> into, uint64_t offset, Deadline deadline) {
  check_access(allowed(handle, offset, into.size(), false));
  bool reachable = false;
  {
    std::unique_lock lock(mutex_);
    wait_for_greeting(lock, deadline);
    if (ended_) fail(ErrorKind::peer_lost, "the peer hung up, or died");
    reachable = out_of_reach_.empty();
  }
  if (reachable) {
    // A peer that has ended has no stamp: a process that reuses its pid is not read by mistake.
    const Access access = read_across(peer_, handle, offset, into);
    if (access != Access::out_of_reach) {
      if (access != Access::ok) {
        std::lock_guard lock(mutex_);
        if (ended_) fail(ErrorKind::peer_lost, "the peer hung up, or died, while its memory was read");
      }
      check_access(access);
      return Path::cma;
    }
  }
  Note note{};
  note.kind = static_cast<uint32_t>(NoteKind::get);
  note.offset = offset;
  note.bytes = into.size();
  note.region = handle.id;
  check_access(send_request(note, into, deadline));
  return Path::served;
}

Path Sideband::write(const RegionHandle& handle, Bytes from, uint64_t offset, Deadline deadline) {
  check_access(allowed(handle, offset, from.size(), true));
  Note note{};
  note.offset = offset;
  note.bytes = from.size();
  note.region = handle.id;
  bool reachable = false;
  {
    std::unique_lock lock(mutex_);
    wait_for_greeting(lock, deadline);
    reachable = peer_reaches_;
  }
  if (reachable) {
    note.kind = static_cast<uint32_t>(NoteKind::take);
    const Access access = send_request(note, from, deadline);
    if (access != Access::out_of_reach) {
      check_access(access);
      return Path::cma;
    }
    std::lock_guard lock(mutex_);
    peer_reaches_ = false;
  }
  note.kind = static_cast<uint32_t>(NoteKind::put);
  check_access(send_request(note, from, deadline));
  return Path::served;
}

void Sideband::wait_for_greeting(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  while (!ended_ && !(greeted_ && reach_known_)) {
    if (deadline.passed()) fail(ErrorKind::timed_out, "the peer's transport sent nothing before the deadline");
    greeting_.wait_for(lock, std::chrono::nanoseconds(deadline.left_ns()));
  }
}

// The memory of a request is not accessed once it is over.
struct Sideband::CloseAtEnd {
  ExposedRegion& region;
  ~CloseAtEnd() { region.close(); }
};

// A request on its caller's stack, for as long as the caller waits, and no longer. Under mutex_.
class Sideband::Registration {
 public:
  Registration(Sideband& sideband, uint64_t number, Request* request) : sideband_(sideband), number_(number) {
    sideband_.requests_[number] = request;
  }
  ~Registration() {
    sideband_.requests_.erase(number_);
    sideband_.greeting_.notify_all();  // others may wait for a place
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  Sideband& sideband_;
  const uint64_t number_;
};

Access Sideband::send_request(Note note, Bytes memory, Deadline deadline) {
  const std::span<std::byte> bytes(const_cast<std::byte*>(memory.data()), memory.size());
  const bool incoming = note.kind == static_cast<uint32_t>(NoteKind::get);
  Request request{std::make_shared<ExposedRegion>(bytes, incoming), incoming, false, Access::ok, {}};
  const CloseAtEnd close{*request.local};  // without the lock, and whatever happens: the memory is the caller's
  std::unique_lock lock(mutex_);
  while (requests_.size() >= kMostOpen && !ended_) {
    if (deadline.passed()) fail(ErrorKind::timed_out, "other reads and writes were still in flight at the deadline");
    greeting_.wait_for(lock, std::chrono::nanoseconds(deadline.left_ns()));
  }
  if (ended_) fail(ErrorKind::peer_lost, "the peer hung up, or died");
  note.number = next_number_++;
  const RegionHandle mine = request.local->handle();
  note.stamp = mine.stamp;
  note.data = mine.data;
  note.from = mine.id;
  const Registration registration(*this, note.number, &request);
  notes_.push_back(note);
  if (note.kind == static_cast<uint32_t>(NoteKind::put)) {
    transfers_.push_back({NoteKind::load, note.number, request.local, 0, note.bytes, 0});
  }
  flush();
  while (!request.done && !ended_ && !deadline.passed()) {
    request.changed.wait_for(lock, std::chrono::nanoseconds(deadline.left_ns()));
  }
  if (request.done) return request.access;
  if (ended_) fail(ErrorKind::peer_lost, "the peer hung up, or died, in the middle of a read or write");
  cancel_request(note);
  fail(ErrorKind::timed_out, "the peer's transport had not done it all before the deadline");
}

void Sideband::cancel_request(const Note& note) {
  std::erase_if(transfers_, [&](const Transfer& t) { return t.kind == NoteKind::load && t.number == note.number; });
  const size_t waiting =
      std::erase_if(notes_, [&](const Note& other) { return other.kind == note.kind && other.number == note.number; });
  if (waiting == 0) send_note(NoteKind::cancel, note.number);  // the peer may have received it
  flush();
}

std::string Sideband::access_path() const {
  std::lock_guard lock(mutex_);
  if (!greeted_) return "";
  return out_of_reach_.empty() ? "cma" : "served: " + out_of_reach_;
}

}  // namespace geartrain
