// Takeover: the ranks of a group do the work of a reducer that is lost, from what they hold; no operation is repeated.
//
// A rank that loses a reducer takes nothing more from it and tells all other ranks how many bytes of its results it has
// (lost): every rank gets the same results of a reducer in the same order, so that this one number says which. Once all
// ranks have told
//
// * results that some have and others lack go from the first of those that have the most to all, out of what each
//   keeps (KeptResults);
// * the rest of the reducer's share, in this and all later operations, is reduced by the ranks: an all-reduce of that
//   part of the array. Ranks still have their own numbers there: of what nobody has, nothing was written.
//
// Both are operations of a group within the group, of the ranks alone, with numbers of its own, which are the same on
// all of them; its frames have kTakeover and the reducer's index in their `operation`. Sums are in rank order whoever
// makes them, so that their bits are those of the reducer. A rank that is lost meanwhile ends the group.
//
// A reducer that is there again, or another process at its address, gets its share back. Ranks dial it by themselves
// (redial.h) and tell each other (back). Once all are connected each begins no more operations, for as long as a
// message takes, and tells how many it has begun (resume): from the largest such number on, the share is the reducer's.
// A rank that loses it meanwhile tells that too (lost); where a rank has said `resume` by then all do, and it is lost
// again. One that does not stay is dialled less and less often (RedialPause), and told of no more.
//
// One for each reducer. One thread, the loop's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/membership.h"
#include "collectives/redial.h"
#include "collectives/sharded_allreduce.h"
#include "collectives/share_owner.h"

namespace geartrain {

// What has become of a group's reducers, in words, until it is asked for: each loss, takeover and return, once.
class ReducerEvents {
 public:
  // Of more that nobody asks for only the number is kept.
  static constexpr size_t kMost = 1024;

  // The loop.
  void add(std::string text) {
    std::lock_guard lock(mutex_);
    if (texts_.size() < kMost) {
      texts_.push_back(std::move(text));
    } else {
      ++left_out_;
    }
    any_.store(true, std::memory_order_release);
  }
  // Any thread. The oldest first; at most so many.
  std::vector<std::string> take(size_t most = ~size_t{0}) {
    std::vector<std::string> out;
    if (!any_.load(std::memory_order_acquire)) return out;
    std::lock_guard lock(mutex_);
    while (!texts_.empty() && out.size() < most) {
      out.push_back(std::move(texts_.front()));
      texts_.erase(texts_.begin());
    }
    if (texts_.empty() && left_out_ != 0 && out.size() < most) {
      out.push_back(std::to_string(std::exchange(left_out_, 0)) + " more losses and returns of reducers, not listed");
    }
    any_.store(!texts_.empty() || left_out_ != 0, std::memory_order_release);
    return out;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
  uint64_t left_out_ = 0;
  std::atomic<bool> any_{false};
};

class Takeover final : public ShardedAllreduce::Host, public ShareOwner::Host {
 public:
  // `shares` are those of the whole group; `reducer` is a member.
  struct Events {
    std::function<void()> lost;             // it may be dialled again from now on
    std::function<uint64_t()> begun;        // how many operations of the whole group were; none more while any holds()
    std::function<void()> resumed;          // this one does not any more
    std::function<void(std::string)> tell;  // of a loss, of its takeover, and of a return
    std::function<uint64_t()> now_ns;
  };
  Takeover(const GroupOptions& options, Membership& members, EventLoop& loop, ChunkBufferPool& blocks,
           ShardedAllreduce& shares, uint32_t reducer, Events events);

  bool lost() const { return lost_; }
  // This rank has lost the reducer, or gives it up after so long a silence.
  void lose(const std::string& why, uint64_t cost_ns = 0);
  // A rank has lost it. Throws frame.
  void took_lost(uint32_t rank, uint64_t position);
  // Gives the reducer up where it is silent, and tells what takes time. Returns the nanoseconds after which to be
  // called again.
  uint64_t on_time() {
    const uint64_t now_ns = events_.now_ns();
    return std::min(watch(now_ns), tell_late(now_ns));
  }
  // A rank has left.
  void left() { decide(); }
  // Whether to dial the reducer; it was reached.
  bool wants() const {
    return lost_ && decided_ && passed_on_.empty() && !back_[options_.rank] && !holds() &&
           pause_.over(events_.now_ns());
  }
  void reached(Dialled dialled);
  void took_back(uint32_t rank);                    // throws frame
  void took_resume(uint32_t rank, uint64_t begun);  // throws frame
  bool holds() const { return begun_[options_.rank].has_value(); }

  // A rank is connected that may not have been told.
  void tell(uint32_t rank) const;
  // An operation of the whole group was begun.
  void began();

  // Frames of the ranks' own operations, and `operation` as it is there. Throw frame.
  std::span<std::byte> room(uint32_t rank, const WireHeader& header);
  void took(uint32_t rank, const WireHeader& header, std::span<std::byte> payload);
  bool next(uint32_t rank, OutFrame* frame);

  // The ranks that the reducer's share waits for.
  std::vector<uint32_t> waited_for() const;
  // Whether a rank still has to do something here for operations that this one has begun.
  bool owes(uint32_t rank) const;
  // Whether other ranks may still need this one.
  bool serves() const { return used_ && owner_.oldest() != ~uint64_t{0}; }
  uint64_t bytes() const { return bytes_; }  // reduced, or passed on, in place of the reducer
  uint64_t losses() const { return losses_; }
  uint64_t returns() const { return returns_; }
  void clear() { inner_.clear(); }

 private:
  void lose(uint64_t position, const std::string& why, uint64_t cost_ns);
  void tell_all(FrameKind kind, uint64_t offset) const;
  uint64_t watch(uint64_t now_ns);
  uint64_t tell_late(uint64_t now_ns);
  void log(std::string text) const;
  void resume();
  void resume_if_all();
  void decide();
  void begin(const Shape& shape, const std::byte* in, std::byte* out);
  uint64_t tagged(uint64_t operation) const;

  void open(uint32_t owner, uint64_t operation, const Open& open) override;
  void parts_for(uint32_t owner) override { members_.kick(owner); }
  void taken(uint32_t, uint64_t, uint64_t) override {}
  void completed(const std::shared_ptr<Work>& work) override;
  void results_for(uint32_t rank) override { members_.kick(rank); }
  void deliver(uint64_t operation, uint64_t offset, std::span<const std::byte> result) override {
    inner_.deliver(operation, offset, result);
  }
  void disagree(const std::string& text, std::vector<uint32_t> ranks) override {
    members_.end({FaultKind::disagree, text, std::move(ranks)});
  }

  static constexpr uint64_t kPassedOn = ~uint64_t{0};  // in the place of an operation's number

  const GroupOptions& options_;
  Membership& members_;
  EventLoop& loop_;
  ShardedAllreduce& shares_;
  const uint32_t reducer_;
  const Events events_;
  const std::vector<double> ranks_shares_;
  const uint64_t silent_ns_, ask_ns_;  // GroupOptions::reducer_silence_s, and when the reducer is queried
  ShareOwner owner_;
  ShardedAllreduce inner_;
  bool lost_ = false, decided_ = false, used_ = false;
  std::vector<std::optional<uint64_t>> positions_;  // by rank
  std::vector<std::byte> passed_on_;                // results that some ranks lack, from `passed_from_` on
  uint64_t passed_from_ = 0;
  std::vector<bool> back_, again_;  // by rank: it is connected again; it has lost that connection too
  // The same of the next loss, of ranks for which the reducer has been back already: a frame of another rank, which
  // says so here, may come late.
  std::vector<bool> next_back_, next_again_;
  std::vector<std::optional<uint64_t>> begun_;  // by rank: what it has said with `resume`
  uint64_t until_ = 0;                          // the first operation whose share the reducer had again
  uint64_t next_number_ = 0;                    // of the operations here
  uint64_t next_operation_ = 0;                 // of the whole group, whose rest was not begun here
  std::map<uint64_t, uint64_t> operations_;     // in progress here, and what they are for
  uint64_t bytes_ = 0, losses_ = 0, returns_ = 0;

  RedialPause pause_;
  bool told_late_ = false;  // that this rank has reached it, and others have not

  // What the connection to the reducer has moved, when that was, and when this was last looked at.
  uint64_t moved_ = 0, moved_ns_ = 0, looked_ns_ = 0;
  bool asked_ = false;
};

}  // namespace geartrain
