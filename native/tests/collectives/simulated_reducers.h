// Reducers of simulated groups (simulated_group.h): processes, and links in memory to them.
//
// Processes die, and are there again; stop, and go on. A link ends, or becomes silent for good: what is sent is lost,
// and no end is seen by either side.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collectives/reducer_session.h"
#include "tests/support/check.h"

namespace geartrain {

// One direction of a connection.
struct SimulatedPipe {
  std::deque<std::byte> bytes;
  size_t granted = 0;              // of them, that have arrived
  bool closed = false;             // by who writes: an end behind the bytes
  bool cut = false, over = false;  // by neither; and once that was noticed
  bool silent = false;             // nothing arrives, and nobody notices
  size_t most = ~size_t{0};        // that it holds
  uint32_t from = 0, to = 0;
};

class SimulatedLink final : public Link {
 public:
  SimulatedLink(Descriptor idle, std::shared_ptr<SimulatedPipe> in, std::shared_ptr<SimulatedPipe> out)
      : Link(std::move(idle)), in_(std::move(in)), out_(std::move(out)) {}
  ~SimulatedLink() override { out_->closed = in_->over = true; }
  size_t write(std::span<struct iovec> parts) override {
    size_t done = 0;
    for (const struct iovec& part : parts) {
      const auto* const from = static_cast<const std::byte*>(part.iov_base);
      if (out_->cut || out_->over || out_->silent) {
        done += part.iov_len;
        continue;
      }
      const size_t n = std::min(part.iov_len, out_->most - std::min(out_->most, out_->bytes.size()));
      out_->bytes.insert(out_->bytes.end(), from, from + n);
      done += n;
    }
    return done;
  }
  size_t read(std::span<struct iovec> parts) override {
    size_t done = 0;
    for (const struct iovec& part : parts) {
      auto* const to = static_cast<std::byte*>(part.iov_base);
      const size_t n = std::min({part.iov_len, in_->granted, in_->bytes.size()});
      std::copy_n(in_->bytes.begin(), n, to);
      in_->bytes.erase(in_->bytes.begin(), in_->bytes.begin() + static_cast<ptrdiff_t>(n));
      in_->granted -= n;
      done += n;
    }
    if (done == 0 && in_->granted != 0 && in_->bytes.empty() && (in_->closed || in_->cut)) {
      fail(ErrorKind::peer_lost, "connection closed");
    }
    return done;
  }
  const char* name() const override { return "tcp"; }

 private:
  const std::shared_ptr<SimulatedPipe> in_, out_;
};

// Reducer processes, of several groups.
class SimulatedReducers {
 public:
  static constexpr uint64_t kStepNs = 1'000'000;

  SimulatedReducers(uint64_t seed, uint32_t processes)
      : random(seed), loop("simulation", [](const std::exception&) {}) {
    CHECK(::pipe2(idle_, O_CLOEXEC) == 0);
    for (uint32_t i = 0; i < processes; ++i) processes_.push_back(std::make_unique<Process>(loop, where_));
  }
  ~SimulatedReducers() {
    loop.call([&] { processes_.clear(); });
    loop.stop();
    ::close(idle_[0]);
    ::close(idle_[1]);
  }

  // A rank's connection; null: it is refused.
  std::unique_ptr<Link> join(uint32_t process, const Join& join, const std::shared_ptr<SimulatedPipe>& up,
                             const std::shared_ptr<SimulatedPipe>& down) {
    ReducerSessions& sessions = processes_[process]->sessions;
    std::string refusal;
    sessions.remove_empty();
    if (stopped(process) || sessions.judge(join, &refusal) != Acceptor::Host::Verdict::welcome) return nullptr;
    sessions.enter(blocks, join, link(up, down));
    return link(down, up);
  }
  std::unique_ptr<Link> link(std::shared_ptr<SimulatedPipe> in, std::shared_ptr<SimulatedPipe> out) {
    return std::make_unique<SimulatedLink>(Descriptor(::dup(idle_[0])), std::move(in), std::move(out));
  }
  Peer* peer(uint32_t process, const Join& join, uint32_t rank) const {
    ReducerSession* const session = processes_[process]->sessions.find(join);
    return session == nullptr ? nullptr : session->peer(rank);
  }
  void kill(uint32_t process) { processes_[process] = std::make_unique<Process>(loop, where_); }
  void stop(uint32_t process, uint64_t steps) { processes_[process]->stopped_until_ns = now_ns() + steps * kStepNs; }
  bool stopped(uint32_t process) const { return now_ns() < processes_[process]->stopped_until_ns; }
  uint64_t now_ns() const { return kStepNs * (1 + steps); }

  std::mt19937_64 random;
  uint64_t steps = 0;
  ChunkBufferPool blocks;
  EventLoop loop;

 private:
  struct Process {
    Process(EventLoop& loop, const std::string& where) : groups(64), sessions(loop, groups, 16 << 20, where) {}
    ReducerGroups groups;
    ReducerSessions sessions;
    uint64_t stopped_until_ns = 0;
  };
  const std::string where_ = "10.0.0.1";
  int idle_[2];
  std::vector<std::unique_ptr<Process>> processes_;
};

}  // namespace geartrain
