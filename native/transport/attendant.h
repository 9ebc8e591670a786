// The one thread of a process that serves the lines beside its connections (aside.h). It is made with the first of
// them, and lives as long as the process; a forked child makes its own. It waits for nobody but in its one epoll.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "descriptor.h"

namespace geartrain {

class Aside;

class Attendant {
 public:
  static Attendant& of_process();
  void add(const std::shared_ptr<Aside>& aside);
  void remove(const Aside* aside);
  void watch(const Aside* aside, bool write) const;  // no lock: from within the line's own
  void wake() const;                                 // a line has work

 private:
  Attendant();
  [[noreturn]] void serve();

  Descriptor epoll_, bell_;
  std::mutex mutex_;
  std::map<const Aside*, std::shared_ptr<Aside>> lines_;
};

}  // namespace geartrain
