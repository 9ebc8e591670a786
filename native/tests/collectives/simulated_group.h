// A group in one thread: ranks and reducers over links in memory, whose bytes arrive in the order that a seed says. The
// same seed has the same schedule, deaths and all. No clock is used: windows are fixed, and nothing has a deadline.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collectives/group_side.h"
#include "collectives/reducer_session.h"
#include "tests/collectives/ranks.h"

namespace geartrain {

// One direction of a connection.
struct SimulatedPipe {
  std::deque<std::byte> bytes;
  size_t granted = 0;              // of them, that have arrived
  bool closed = false;             // by who writes: an end behind the bytes
  bool cut = false, over = false;  // by neither; and once that was noticed
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
      if (!out_->cut && !out_->over) out_->bytes.insert(out_->bytes.end(), from, from + part.iov_len);
      done += part.iov_len;
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

struct Simulation {
  uint64_t seed = 0;
  uint32_t world = 2;
  std::vector<double> shares;
  std::vector<Shape> all;
  size_t at_once = 4;
  uint64_t fixed_window = 64 << 10;
  int reducer_losses = 2;  // kills of processes, and of connections
  bool rank_dies = false;
  bool closes_early = true;  // ranks that have done all leave while others go on
};

class SimulatedGroup {
 public:
  explicit SimulatedGroup(const Simulation& given)
      : given_(given),
        random_(given.seed),
        reducers_(static_cast<uint32_t>(given.shares.size()) - given.world),
        loop_("simulation", [](const std::exception&) {}) {
    CHECK(::pipe2(idle_, O_CLOEXEC) == 0);
    for (size_t i = 0; i < given.all.size(); ++i) {
      const uint64_t base = 900 + 100 * i;
      expected_.push_back(reference(base, given.world, given.all[i]));
    }
    for (uint32_t rank = 0; rank < given.world; ++rank) ranks_.push_back(std::make_unique<Rank>(*this, rank));
    sessions_.resize(reducers_);
    loop_.call([&] { connect(); });
    for (const auto& [one, other] : pairs()) slow_[{one, other}] = random_() % 4 == 0 ? 40 : 1;
  }
  ~SimulatedGroup() {
    loop_.call([&] {
      for (const auto& rank : ranks_) end(*rank);
      for (auto& session : sessions_) session.reset();
      dialled_.clear();
    });
    loop_.stop();
    ::close(idle_[0]);
    ::close(idle_[1]);
  }

  struct Outcome {
    std::string wrong;  // empty: nothing
    uint64_t lost = 0, steps = 0;
    bool all_back = false;
  };
  // Until all operations are done, and all ranks have left.
  Outcome run() {
    constexpr uint64_t kMost = 400'000;
    while (steps_ < kMost && wrong_.empty() && !done()) {
      loop_.call([&] {
        for (uint64_t n = 1 + random_() % 24; n != 0 && wrong_.empty(); --n) step();
      });
    }
    if (wrong_.empty() && !done()) wrong_ = "it hangs: " + state();
    return {wrong_, lost_, steps_, all_back_};
  }

 private:
  struct Rank {
    Rank(SimulatedGroup& group, uint32_t rank)
        : options(options_of(group, rank)), side(options, group.loop_, [] {}), rank(rank) {}
    static GroupOptions options_of(const SimulatedGroup& group, uint32_t rank) {
      GroupOptions out;
      out.rank = rank;
      out.world = group.given_.world;
      out.shares = group.given_.shares;
      for (uint32_t i = 0; i < group.reducers_; ++i) out.reducers.push_back("10.0.0.1:" + std::to_string(i));
      out.outlives_reducers = true;
      out.fixed_window_bytes = group.given_.fixed_window;
      out.shm = false;
      return out;
    }
    const GroupOptions options;
    GroupSide side;
    const uint32_t rank;
    std::vector<Array> arrays;
    std::vector<std::shared_ptr<Work>> works;
    std::vector<bool> checked;
    size_t done = 0;
    bool told = false, left = false, dead = false;
  };
  struct Dialling {
    uint32_t rank, member;
    Dialled dialled;
  };

  std::vector<std::pair<uint32_t, uint32_t>> pairs() const {
    std::vector<std::pair<uint32_t, uint32_t>> out;
    const uint32_t members = given_.world + reducers_;
    for (uint32_t one = 0; one < members; ++one) {
      for (uint32_t other = 0; other < members; ++other) out.emplace_back(one, other);
    }
    return out;
  }

  std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> link(uint32_t one, uint32_t other) {
    auto there = std::make_shared<SimulatedPipe>(), back = std::make_shared<SimulatedPipe>();
    there->from = back->to = one;
    there->to = back->from = other;
    pipes_.push_back(there);
    pipes_.push_back(back);
    return {std::make_unique<SimulatedLink>(Descriptor(::dup(idle_[0])), back, there),
            std::make_unique<SimulatedLink>(Descriptor(::dup(idle_[0])), there, back)};
  }

  void connect() {
    const auto enter = [&](Rank& rank, uint32_t member, std::unique_ptr<Link> link) {
      Join join{};
      join.rank = member;
      static_cast<Acceptor::Host&>(rank.side.members()).enter(join, std::move(link));
    };
    for (uint32_t one = 0; one < given_.world; ++one) {
      for (uint32_t other = one + 1; other < given_.world; ++other) {
        auto [here, there] = link(one, other);
        enter(*ranks_[one], other, std::move(here));
        enter(*ranks_[other], one, std::move(there));
      }
      for (uint32_t i = 0; i < reducers_; ++i) {
        if (given_.shares[given_.world + i] <= 0) continue;
        enter(*ranks_[one], given_.world + i, join_reducer(one, i));
      }
    }
  }

  // A rank joins a reducer; null: it is refused, or the reducer is down.
  std::unique_ptr<Link> join_reducer(uint32_t rank, uint32_t reducer) {
    std::unique_ptr<ReducerSession>& session = sessions_[reducer];
    if (session != nullptr && session->ranks() == 0) session.reset();
    if (session != nullptr && session->has(rank)) return nullptr;
    if (session == nullptr) {
      Join join{};
      join.world = given_.world;
      join.owners = static_cast<uint32_t>(
          std::count_if(given_.shares.begin(), given_.shares.end(), [](double share) { return share > 0; }));
      join.member = given_.world + reducer;
      session = std::make_unique<ReducerSession>(loop_, blocks_, join, 16 << 20, "10.0.0.1");
    }
    auto [here, there] = link(rank, given_.world + reducer);
    session->add(rank, std::move(there));
    return std::move(here);
  }

  // --- what happens -------------------------------------------------------------------------------------------------

  bool done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->left || rank->dead; });
  }

  void step() {
    ++steps_;
    const uint64_t what = random_() % 100;
    if (what < 70) return deliver();
    if (what < 85) return post(some_rank());
    if (what < 90) return dial(some_rank());
    if (what < 94) return reach();
    if (what < 96) return lose_some();
    leave(some_rank());
  }

  Rank& some_rank() { return *ranks_[random_() % ranks_.size()]; }

  void deliver() {
    std::erase_if(pipes_, [](const auto& pipe) { return pipe->over; });
    if (pipes_.empty()) return;
    const std::shared_ptr<SimulatedPipe> pipe = pipes_[random_() % pipes_.size()];
    if (random_() % slow_[{pipe->from, pipe->to}] != 0) return;
    // Pieces of any size, and now and then all.
    pipe->granted = random_() % 3 == 0 ? 1 + random_() % 100 : random_() % 2 == 0 ? 40'000 : 1 << 24;
    if (Peer* const peer = peer_of(pipe->to, pipe->from)) peer->look();
    pipe->granted = 0;
    if (pipe->to < given_.world) check(*ranks_[pipe->to]);
  }

  Peer* peer_of(uint32_t member, uint32_t other) {
    if (member < given_.world) return ranks_[member]->dead ? nullptr : ranks_[member]->side.members().peer(other);
    ReducerSession* const session = sessions_[member - given_.world].get();
    return session == nullptr ? nullptr : session->peer(other);
  }

  void post(Rank& rank) {
    const size_t i = rank.works.size();
    if (rank.dead || rank.told || i == given_.all.size() || i >= rank.done + given_.at_once) return;
    rank.arrays.push_back(numbers(900 + 100 * i + rank.rank, given_.all[i].dtype, given_.all[i].count));
    // The array's memory stays where it is when the vector grows.
    std::byte* const at = rank.arrays.back().data();
    rank.works.push_back(std::make_shared<Work>(given_.all[i], at, at, 1e6));
    rank.checked.push_back(false);
    rank.side.begin(rank.works.back());
    check(rank);
  }

  void check(Rank& rank) {
    if (rank.dead) return;
    for (size_t i = rank.done; i < rank.works.size(); ++i) {
      Work& work = *rank.works[i];
      if (rank.checked[i] || !work.done()) continue;
      rank.checked[i] = true;
      const Fault& fault = work.fault();
      if (fault.kind == FaultKind::none) {
        if (rank.arrays[i] != expected_[i]) {
          const auto at = std::mismatch(rank.arrays[i].begin(), rank.arrays[i].end(), expected_[i].begin()).first;
          say(rank, i, "has a wrong sum from byte " + std::to_string(at - rank.arrays[i].begin()) + " on");
        }
        std::fill(rank.arrays[i].begin(), rank.arrays[i].end(), std::byte{0xff});
      } else if (!died_ || fault.kind != FaultKind::rank_lost || fault.members != std::vector{*died_}) {
        say(rank, i, "failed: " + fault.text);
      }
    }
    while (rank.done < rank.works.size() && rank.checked[rank.done]) ++rank.done;
  }

  void say(const Rank& rank, size_t i, const std::string& what) {
    wrong_ = "rank " + std::to_string(rank.rank) + ", operation " + std::to_string(i) + " (" + given_.all[i].text() +
             "), " + what;
    for (const auto& one : ranks_) {
      for (const std::string& event : one->side.reducer_events().take()) {
        wrong_ += "\n  rank " + std::to_string(one->rank) + ": " + event;
      }
    }
  }

  void dial(Rank& rank) {
    if (rank.dead || rank.left) return;
    for (const Redial::Wanted& wanted : rank.side.wanted()) {
      const auto already = [&](const Dialling& one) { return one.rank == rank.rank && one.member == wanted.member; };
      if (std::any_of(dialled_.begin(), dialled_.end(), already)) continue;
      if (std::unique_ptr<Link> link = join_reducer(rank.rank, wanted.member - given_.world)) {
        Welcome welcome{};
        welcome.max_window_bytes = 16 << 20;
        dialled_.push_back({rank.rank, wanted.member, {std::move(link), welcome}});
      }
    }
  }

  void reach() {
    if (dialled_.empty()) return;
    const size_t i = random_() % dialled_.size();
    Dialling one = std::move(dialled_[i]);
    dialled_.erase(dialled_.begin() + static_cast<ptrdiff_t>(i));
    if (!ranks_[one.rank]->dead) ranks_[one.rank]->side.reached(one.member, std::move(one.dialled));
  }

  // Anything of what is under way may be lost with it.
  void cut(SimulatedPipe& pipe) {
    pipe.cut = true;
    pipe.bytes.resize(pipe.bytes.empty() ? 0 : random_() % (pipe.bytes.size() + 1));
  }

  void lose_some() {
    if (reducers_ == 0 || random_() % 4 != 0) return;
    if (given_.rank_dies && !died_ && random_() % 6 == 0) return kill(some_rank());
    if (losses_ >= given_.reducer_losses) return;
    ++losses_;
    const uint32_t reducer = static_cast<uint32_t>(random_() % reducers_), member = given_.world + reducer;
    if (random_() % 2 == 0) {  // its process
      for (const auto& pipe : pipes_) {
        if (pipe->from == member || pipe->to == member) cut(*pipe);
      }
      sessions_[reducer].reset();
      return;
    }
    const uint32_t rank = some_rank().rank;
    for (const auto& pipe : pipes_) {
      if ((pipe->from == member && pipe->to == rank) || (pipe->to == member && pipe->from == rank)) cut(*pipe);
    }
  }

  void kill(Rank& rank) {
    if (rank.left || rank.told) return;
    died_ = rank.rank;
    for (const auto& pipe : pipes_) {
      if (pipe->from == rank.rank || pipe->to == rank.rank) cut(*pipe);
    }
    end(rank);
  }

  void end(Rank& rank) {
    rank.dead = true;
    rank.side.members().end({FaultKind::closed, "the group was closed", {}}, false);
    rank.side.operations().finish_all();
    rank.side.members().drop_peers();
  }

  void leave(Rank& rank) {
    GroupCounts counts;
    rank.side.operations().count(&counts);
    lost_ = std::max(lost_, counts.lost_reducers);
    if (rank.dead || rank.left || rank.done < given_.all.size()) {
      // A rank whose group is over posts no more.
      if (died_ && !rank.dead && rank.side.members().over() && rank.done == rank.works.size()) rank.left = true;
      return;
    }
    if (!given_.closes_early && std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& one) {
          return !one->dead && one->done < given_.all.size();
        })) {
      return;
    }
    Operations& operations = rank.side.operations();
    if (rank.side.members().over()) {
      rank.left = true;
      return;
    }
    if (!rank.told) {
      bool waiting = operations.serves();
      rank.side.members().for_each_open([&](const Peer& peer) { waiting |= !peer.drained(); });
      if (waiting) return;
      rank.told = true;
      return operations.tell_complete();
    }
    if (!operations.all_complete()) return;
    if (counts.lost_reducers == 0) all_back_ = true;
    rank.side.leave();
    rank.left = true;
  }

  std::string state() const {
    std::string out;
    for (const auto& rank : ranks_) {
      out += " rank " + std::to_string(rank->rank) + " has done " + std::to_string(rank->done) + " of " +
             std::to_string(rank->works.size()) + (rank->told ? " and says so" : "") + (rank->left ? ", left" : "") +
             (rank->dead ? ", dead" : "");
      for (const uint32_t member : rank->side.operations().waited_for(rank->done)) {
        out += " waits for " + std::to_string(member);
      }
      out += ";";
    }
    return out;
  }

  const Simulation given_;
  std::mt19937_64 random_;
  const uint32_t reducers_;
  int idle_[2];
  std::vector<Array> expected_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::shared_ptr<SimulatedPipe>> pipes_;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> slow_;
  std::vector<Dialling> dialled_;
  ChunkBufferPool blocks_;
  std::vector<std::unique_ptr<ReducerSession>> sessions_;
  std::optional<uint32_t> died_;
  int losses_ = 0;
  uint64_t steps_ = 0, lost_ = 0;
  bool all_back_ = false;
  std::string wrong_;
  EventLoop loop_;
};

}  // namespace geartrain
