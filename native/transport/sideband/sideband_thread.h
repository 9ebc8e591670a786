// Sideband thread: one thread of a process that serves the sidebands of its connections (sideband.h). It starts with
// the first of them, and lives as long as the process; a forked child makes its own. It blocks only in its one epoll.
// An exception ends the sideband that it came from, and no other.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/descriptor.h"
#include "base/lifetime.h"

namespace geartrain {

// Interval of heartbeats.
constexpr double kHeartbeatS = 0.5;

// A sideband as the thread serves it: it alone calls these, except socket().
class SidebandLine {
 public:
  virtual ~SidebandLine() = default;
  virtual int socket() const = 0;  // watched from add() to remove()
  virtual void on_ready() = 0;     // the socket may be read, or written
  virtual void tick() = 0;         // every kHeartbeatS
  virtual bool has_work() const = 0;
  virtual void work() = 0;  // a piece of it: then other sidebands get their turn
  // Ends it: one of the others threw.
  virtual void fail_line(const std::string& why) noexcept = 0;
};

class SidebandThread {
 public:
  static SidebandThread& of_process() { return of_this_process<SidebandThread>(); }
  SidebandThread();
  void add(const std::shared_ptr<SidebandLine>& line);
  void remove(const SidebandLine* line);
  void unwatch(const SidebandLine* line) const;            // no lock; it has its heartbeats still
  void watch(const SidebandLine* line, bool write) const;  // no lock: from within the sideband's own
  void wake() const { ring_bell(bell_); }                  // a line has work

 private:
  [[noreturn]] void serve() noexcept;
  struct Round;
  void serve_round(Round& round);

  Descriptor epoll_, bell_;
  std::mutex mutex_;
  std::map<const SidebandLine*, std::shared_ptr<SidebandLine>> lines_;
  OwnThread thread_;
};

}  // namespace geartrain
