// Groups in one thread: ranks over links in memory to each other and to reducers, whose bytes arrive in the order that
// a seed says. The same seed has the same schedule, deaths and all. Windows are fixed, nothing has a deadline, and
// silence and pauses go by a clock that counts steps.
//
// Reducers die, and are there again; stop, and go on; and a connection ends, or becomes silent for good: what is sent
// is lost, and no end is seen by either side.
#pragma once

#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collectives/group_side.h"
#include "tests/collectives/ranks.h"
#include "tests/collectives/simulated_reducers.h"

namespace geartrain {

struct Simulation {
  uint64_t seed = 0;
  uint32_t world = 2;
  std::vector<double> shares;
  std::vector<Shape> all;
  size_t at_once = 4;
  uint64_t fixed_window = 64 << 10;
  int reducer_losses = 2;  // kills of processes, and of connections
  int silences = 0;        // processes that stop for a while, and connections from which nothing comes any more
  double silence_s = 0.4, redial_s = 0;
  size_t pipe_bytes = ~size_t{0};  // that a connection holds
  bool same_process = false;       // the first two reducers are channels to one process
  bool waits_for_return = false;   // ranks leave once every reducer is back
  bool rank_dies = false;
  // Of the first reducer's process, each when all ranks have had it for so long, and its results. It is there at once.
  int kills = 0;
  uint64_t kill_after_steps = 0;
  bool closes_early = true;  // ranks that have done all leave while others go on
};

class SimulatedGroup {
 public:
  // `group` is a number of its own at these reducers.
  SimulatedGroup(const Simulation& given, SimulatedReducers& processes, uint8_t group = 1)
      : given_(given),
        processes_(processes),
        random_(processes.random),
        reducers_(static_cast<uint32_t>(given.shares.size()) - given.world),
        group_(group),
        loop_(processes.loop) {
    for (size_t i = 0; i < given.all.size(); ++i) {
      const uint64_t base = 900 + 100 * i;
      expected_.push_back(reference(base, given.world, given.all[i]));
    }
    for (uint32_t rank = 0; rank < given.world; ++rank) ranks_.push_back(std::make_unique<Rank>(*this, rank));
    loop_.call([&] { connect(); });
    for (const auto& [one, other] : pairs()) slow_[{one, other}] = random_() % 4 == 0 ? 40 : 1;
  }
  ~SimulatedGroup() {
    loop_.call([&] {
      for (const auto& rank : ranks_) end(*rank);
      dialled_.clear();
    });
    loop_.call([] {});  // what they have posted
  }

  struct Outcome {
    std::string wrong;  // empty: nothing
    uint64_t lost = 0, steps = 0;
    bool all_back = false;
    bool overlapped = false;  // a reducer was back while another one was lost
    bool silent = false;      // one was given up for its silence
    int kills = 0;
    uint64_t longest_away_steps = 0;  // from a kill until all ranks had the reducer back
  };
  // Until all operations of all groups are done, and all ranks have left.
  static void run(const std::vector<SimulatedGroup*>& groups) {
    SimulatedReducers& all = groups.front()->processes_;
    for (SimulatedGroup* const one : groups) one->together_ = groups;
    const auto wrong = [](const SimulatedGroup* one) { return !one->wrong_.empty(); };
    const auto done = [](const SimulatedGroup* one) { return one->done(); };
    const auto over = [&] {
      return std::any_of(groups.begin(), groups.end(), wrong) || std::all_of(groups.begin(), groups.end(), done);
    };
    const uint64_t most = 600'000 * groups.size();
    while (all.steps < most && !over()) {
      all.loop.call([&] {
        for (uint64_t n = 1 + all.random() % 100; n != 0 && !over(); --n) {
          ++all.steps;
          groups[all.random() % groups.size()]->step();
        }
      });
    }
    if (over()) return;
    for (SimulatedGroup* const one : groups) {
      if (!one->done()) one->wrong_ = "it hangs: " + one->state();
    }
  }
  Outcome outcome() const { return {wrong_, lost_, steps_, all_back_, overlapped_, silent_, kills_, longest_away_}; }

 private:
  struct Rank {
    Rank(SimulatedGroup& group, uint32_t rank)
        : options(options_of(group, rank)),
          side(
              options, group.loop_, [] {}, [&group] { return group.processes_.now_ns(); }),
          rank(rank) {}
    static GroupOptions options_of(const SimulatedGroup& group, uint32_t rank) {
      GroupOptions out;
      out.rank = rank;
      out.world = group.given_.world;
      out.shares = group.given_.shares;
      for (uint32_t i = 0; i < group.reducers_; ++i) out.reducers.push_back("10.0.0.1:" + std::to_string(i));
      out.outlives_reducers = true;
      out.fixed_window_bytes = group.given_.fixed_window;
      out.reducer_silence_s = group.given_.silence_s;
      out.redial_s = group.given_.redial_s;
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
    uint64_t returns = 0;
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

  std::shared_ptr<SimulatedPipe> pipe(uint32_t from, uint32_t to) {
    auto made = std::make_shared<SimulatedPipe>();
    made->from = from;
    made->to = to;
    made->most = given_.pipe_bytes;
    pipes_.push_back(made);
    return made;
  }

  void connect() {
    const auto enter = [&](Rank& rank, uint32_t member, std::unique_ptr<Link> link) {
      Join join{};
      join.rank = member;
      static_cast<Acceptor::Host&>(rank.side.members()).enter(join, std::move(link));
    };
    for (uint32_t one = 0; one < given_.world; ++one) {
      for (uint32_t other = one + 1; other < given_.world; ++other) {
        const auto there = pipe(one, other), back = pipe(other, one);
        enter(*ranks_[one], other, processes_.link(back, there));
        enter(*ranks_[other], one, processes_.link(there, back));
      }
      for (uint32_t i = 0; i < reducers_; ++i) {
        if (given_.shares[given_.world + i] <= 0) continue;
        enter(*ranks_[one], given_.world + i, join_reducer(one, i));
      }
    }
  }

  uint32_t process_of(uint32_t reducer) const { return given_.same_process && reducer == 1 ? 0 : reducer; }

  Join join_of(uint32_t rank, uint32_t reducer) const {
    Join join{};
    join.group[0] = group_;
    join.rank = rank;
    join.world = given_.world;
    join.owners = static_cast<uint32_t>(
        std::count_if(given_.shares.begin(), given_.shares.end(), [](double share) { return share > 0; }));
    join.member = given_.world + reducer;
    join.channel = process_of(reducer) == reducer ? 0 : 1;
    return join;
  }

  // A rank joins a reducer; null: it is refused, or the reducer is down.
  std::unique_ptr<Link> join_reducer(uint32_t rank, uint32_t reducer) {
    const uint32_t member = given_.world + reducer;
    return processes_.join(process_of(reducer), join_of(rank, reducer), pipe(rank, member), pipe(member, rank));
  }

  // --- what happens -------------------------------------------------------------------------------------------------

  bool done() const {
    if (given_.kills != 0 && kills_ == given_.kills && !away_since_) return true;
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->left || rank->dead; });
  }

  void step() {
    ++steps_;
    if (given_.kills != 0) kill_again();
    const uint64_t what = random_() % 100;
    if (what < 3) return tick(some_rank());
    if (what < 70) return deliver();
    if (what < 85) return post(some_rank());
    if (what < 90) return dial(some_rank());
    if (what < 94) return reach();
    if (what < 96) return lose_some();
    leave(some_rank());
  }

  Rank& some_rank() { return *ranks_[random_() % ranks_.size()]; }

  void tick(Rank& rank) {
    if (rank.dead || rank.left) return;
    rank.side.operations().on_time();
    check(rank);
  }

  void deliver() {
    std::erase_if(pipes_, [](const auto& pipe) { return pipe->over || pipe.use_count() == 1; });
    if (pipes_.empty()) return;
    const std::shared_ptr<SimulatedPipe> pipe = pipes_[random_() % pipes_.size()];
    if (random_() % slow_[{pipe->from, pipe->to}] != 0 || pipe->silent) return;
    if (pipe->to >= given_.world && processes_.stopped(process_of(pipe->to - given_.world))) return;
    // Pieces of any size, and now and then all.
    pipe->granted = random_() % 3 == 0 ? 1 + random_() % 100 : random_() % 2 == 0 ? 40'000 : 1 << 24;
    if (Peer* const peer = peer_of(pipe->to, pipe->from)) peer->look();
    pipe->granted = 0;
    if (pipe->to < given_.world) check(*ranks_[pipe->to]);
  }

  Peer* peer_of(uint32_t member, uint32_t other) {
    if (member < given_.world) return ranks_[member]->dead ? nullptr : ranks_[member]->side.members().peer(other);
    const uint32_t reducer = member - given_.world;
    return processes_.peer(process_of(reducer), join_of(other, reducer), other);
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
    GroupCounts counts;
    rank.side.operations().count(&counts);
    overlapped_ |= counts.reducer_returns > rank.returns && counts.lost_reducers != 0;
    rank.returns = counts.reducer_returns;
    for (const std::string& event : rank.side.reducer_events().take()) {
      events_.push_back("rank " + std::to_string(rank.rank) + ": " + event);
      look_at(rank, event);
    }
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

  // Nobody is silent who owes nothing.
  void look_at(const Rank& rank, const std::string& event) {
    const std::string name = event.substr(0, event.find(" is "));
    if (const size_t at = event.find("its share from operation "); at != std::string::npos) {
      returned_at_[{rank.rank, name}] = std::stoull(event.substr(at + 25));
    }
    if (event.find("silent for") == std::string::npos) return;
    silent_ = true;
    const size_t at = event.find("in operation ");
    const uint64_t operation = at == std::string::npos ? 0 : std::stoull(event.substr(at + 13));
    if (at == std::string::npos || operation < returned_at_[{rank.rank, name}]) {
      say(rank, operation, "is not what this reducer is waited for: " + event);
    }
  }

  void say(const Rank& rank, size_t i, const std::string& what) {
    wrong_ = "rank " + std::to_string(rank.rank) + ", operation " + std::to_string(i) + " (" + given_.all[i].text() +
             "), " + what;
    for (const std::string& event : events_) wrong_ += "\n  " + event;
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
    if (ranks_[one.rank]->dead) return;
    ranks_[one.rank]->side.reached(one.member, std::move(one.dialled));
    check(*ranks_[one.rank]);
  }

  // Anything of what is under way may be lost with it.
  void cut(SimulatedPipe& pipe) {
    pipe.cut = true;
    pipe.bytes.resize(pipe.bytes.empty() ? 0 : random_() % (pipe.bytes.size() + 1));
  }

  void lose_some() {
    if (reducers_ == 0 || random_() % 4 != 0) return;
    if (given_.rank_dies && !died_ && random_() % 6 == 0) return kill(some_rank());
    const uint32_t reducer = static_cast<uint32_t>(random_() % reducers_), member = given_.world + reducer;
    if (silences_ < given_.silences && random_() % 2 == 0) {
      ++silences_;
      if (random_() % 2 == 0) return processes_.stop(process_of(reducer), random_() % 6000);
      const uint32_t rank = some_rank().rank;
      for (const auto& pipe : pipes_) {
        pipe->silent |= (pipe->from == member && pipe->to == rank) || (pipe->to == member && pipe->from == rank);
      }
      return;
    }
    if (losses_ >= given_.reducer_losses) return;
    ++losses_;
    if (random_() % 2 == 0) return kill_process(process_of(reducer));
    const uint32_t rank = some_rank().rank;
    for (const auto& pipe : pipes_) {
      if ((pipe->from == member && pipe->to == rank) || (pipe->to == member && pipe->from == rank)) cut(*pipe);
    }
  }

  void kill_process(uint32_t process) {
    for (SimulatedGroup* const group : together_) {
      for (const auto& pipe : group->pipes_) {
        const uint32_t member = std::max(pipe->from, pipe->to), world = group->given_.world;
        if (member >= world && group->process_of(member - world) == process) group->cut(*pipe);
      }
    }
    processes_.kill(process);
  }

  void kill_again() {
    const bool there = std::all_of(ranks_.begin(), ranks_.end(),
                                   [&](const auto& rank) { return rank->returns >= static_cast<uint64_t>(kills_); });
    if (!there) return;
    if (away_since_) {
      longest_away_ = std::max(longest_away_, steps_ - *away_since_);
      away_since_.reset();
      there_since_ = steps_;
      done_then_ = 0;
      for (const auto& rank : ranks_) done_then_ = std::max(done_then_, rank->works.size());
    }
    const bool used =
        std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) { return rank->done > done_then_; });
    if (kills_ == given_.kills || !used || steps_ - there_since_ < given_.kill_after_steps) return;
    ++kills_;
    away_since_ = steps_;
    kill_process(0);
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
    returned_ = returned_ || all_returned();
    if (given_.waits_for_return && !returned_) return;
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

  // And this group loses none of its own doing any more.
  bool all_returned() {
    if (losses_ < given_.reducer_losses || silences_ < given_.silences) return false;
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
      GroupCounts counts;
      rank->side.operations().count(&counts);
      return rank->left || (rank->done == given_.all.size() && counts.lost_reducers == 0);
    });
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
    for (const std::string& event : events_) out += "\n  " + event;
    return out;
  }

  const Simulation given_;
  SimulatedReducers& processes_;
  std::mt19937_64& random_;
  const uint32_t reducers_;
  const uint8_t group_;
  std::vector<Array> expected_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::shared_ptr<SimulatedPipe>> pipes_;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> slow_;
  std::vector<Dialling> dialled_;
  std::vector<SimulatedGroup*> together_{this};  // groups of the same reducers
  std::optional<uint32_t> died_;
  int kills_ = 0;
  std::optional<uint64_t> away_since_;
  uint64_t there_since_ = 0, longest_away_ = 0;
  size_t done_then_ = 0;  // as many operations had been begun when it was there again
  int losses_ = 0, silences_ = 0;
  uint64_t steps_ = 0, lost_ = 0;
  bool returned_ = false, all_back_ = false, overlapped_ = false, silent_ = false;
  std::vector<std::string> events_;
  std::map<std::pair<uint32_t, std::string>, uint64_t> returned_at_;  // by rank and reducer: the first operation
  std::string wrong_;
  EventLoop& loop_;
};

}  // namespace geartrain
