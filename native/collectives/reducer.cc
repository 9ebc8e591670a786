#include "collectives/reducer.h"

#include <chrono>
#include <thread>
#include <vector>

#include "collectives/closing.h"
#include "collectives/reducer_thread.h"

namespace geartrain {
namespace {

constexpr double kLastFramesS = 0.5;  // of close(), for the ranks to be told

}  // namespace

class Reducer::Body {
 public:
  explicit Body(const ReducerOptions& options) : shared_(options) {
    if (options.threads == 0 || options.threads > kMostReducerThreads) {
      fail(ErrorKind::argument, "a reducer has 1 to ", kMostReducerThreads, " threads, found ", options.threads);
    }
    for (uint32_t i = 0; i < options.threads; ++i) threads().push_back(std::make_unique<ReducerThread>(shared_));
    // The one that listens comes last: it passes connections on to all others.
    for (uint32_t i = options.threads; i-- != 0;) threads()[i]->start(i == 0);
  }

  ~Body() {
    threads()[0]->stop_listening();
    for (const auto& thread : threads()) thread->stop();
  }

  const std::string& address() const { return shared_.address; }

  ReducerCounts counts() {
    ReducerCounts out;
    bool open = true;
    for (const auto& thread : threads()) open = open && thread->count(&out);
    if (!open) fail(ErrorKind::hung_up, "the reducer was closed");
    shared_.groups.count(&out);
    for (const auto& thread : threads()) out.refused += thread->refused();
    return out;
  }

  void close(Deadline deadline) {
    if (threads()[0]->forked() || !closing_.enter(deadline)) return;
    try {
      leave();
    } catch (const std::exception&) {
      // Memory runs out: then without a word.
    }
    threads()[0]->stop_listening();
    for (const auto& thread : threads()) thread->stop();
    closing_.leave();
  }

 private:
  using Threads = std::vector<std::unique_ptr<ReducerThread>>;
  Threads& threads() { return shared_.threads; }

  // Whether `what` holds of all threads before `passed`. False too when one has ended.
  template <typename Passed>
  bool wait_for_all(bool (ReducerThread::*what)(bool*), const Passed& passed) {
    for (;;) {
      bool all = true;
      for (const auto& thread : threads()) {
        bool done = false;
        if (!((*thread).*what)(&done)) return false;
        all = all && done;
      }
      if (all) return true;
      if (passed()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  void leave() {
    for (const auto& thread : threads()) {
      if (!thread->refuse_groups()) return;
    }
    wait_for_all(&ReducerThread::has_ended, [&] { return closing_.deadline().passed(); });
    for (const auto& thread : threads()) {
      if (!thread->end_sessions()) return;
    }
    const Deadline last = Deadline::after(kLastFramesS);
    wait_for_all(&ReducerThread::has_told, [&] { return last.passed(); });
  }

  ReducerThread::Shared shared_;
  Closing closing_;
};
Reducer::Reducer(const ReducerOptions& options) : body_(std::make_unique<Body>(options)) {}

Reducer::~Reducer() = default;

std::string Reducer::address() const {
  return body_->address();
}

ReducerCounts Reducer::counts() {
  return body_->counts();
}

void Reducer::close(Deadline deadline) {
  body_->close(deadline);
}

}  // namespace geartrain
