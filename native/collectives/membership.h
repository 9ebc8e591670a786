// Membership of a group: its members, the links to them, and the fault that ends it for all.
//
// Every rank listens; of two ranks the later one dials, and ranks dial reducers. Links are made on the caller's thread
// (connect), or by the acceptor's listener; from add_peer() on a member is a Peer of the loop.
//
// On the loop, unless stated otherwise.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/condition_variable.h"
#include "collectives/acceptor.h"
#include "collectives/group_options.h"
#include "collectives/peer.h"

namespace geartrain {

std::string ranks_text(std::span<const uint32_t> ranks);

class Membership final : public Acceptor::Host {
 public:
  struct Events {
    std::function<void()> ended;                       // on the loop; the fault is known, and the members were notified
    std::function<void(uint64_t max_window)> welcome;  // a member was reached that grants this window
    std::function<void(uint32_t member)> entered;      // a member is connected
  };
  Membership(const GroupOptions& options, EventLoop& loop, Peer::Side& side, Events events);

  // Listens, but in simulations. The caller's thread, once the loop runs. Throws os, untrusted.
  void open();
  // Accepts no more members. Any thread but the loop's.
  void close() { acceptor_->close(); }
  // Once the group has ended: members that wait to be let in are refused, with the fault.
  void refuse_waiting() {
    if (acceptor_ != nullptr) acceptor_->retry();
  }
  // After the loop has stopped. drop_peers() also hangs up on those who wait to be let in.
  void drop_peers() {
    peers_.clear();
    if (acceptor_ != nullptr) acceptor_->hang_up();
  }
  void drop_acceptor() { acceptor_.reset(); }

  // Any thread.
  const std::string& address() const { return address_; }
  uint64_t refused() const { return acceptor_->refused(); }
  std::string name_of(uint32_t member) const;
  Fault fault() const;
  // Links to all members that this rank exchanges data with, which are dialled at once. The caller's thread. Throws
  // timed_out, not_viable, untrusted, peer_lost, hung_up; but for the last two, the group has ended on all members that
  // were reached. MembersUnreached names all that were not.
  void connect(const std::vector<std::string>& addresses, Deadline deadline);

  // Whether all ranks are on this host and share memory, as their addresses say: the same on all of them. Once
  // connected.
  bool one_host() const { return one_host_; }
  uint32_t size() const { return members_; }
  uint32_t next_rank() const { return (options_.rank + 1) % options_.world; }
  uint32_t previous_rank() const { return (options_.rank + options_.world - 1) % options_.world; }
  // Null: it is not connected, or not any more.
  Peer* peer(uint32_t member) const { return peers_[member].get(); }
  // Those whose links are open.
  template <typename Do>
  void for_each_open(Do&& act) const {
    for (const auto& peer : peers_) {
      if (peer != nullptr && !peer->closed()) act(*peer);
    }
  }
  // To a member, where it is connected.
  void send_control(uint32_t member, FrameKind kind, uint64_t operation, uint64_t offset = 0,
                    std::span<const std::byte> payload = {}) const;
  void kick(uint32_t member) const;

  // Ends the group: all members are notified, and the callers' memory is not touched any more. The first fault
  // counts.
  void end(Fault fault, bool notify = true);
  // Ends it after an exception here: memory ran out, usually.
  void failed(const std::exception& error) noexcept;
  bool over() const { return fault_ != nullptr; }
  const std::shared_ptr<const Fault>& ending() const { return fault_; }

  // The member's link is gone.
  void discard(uint32_t member);
  // Hangs up on a member, which may come again.
  void drop(uint32_t member);
  void readmit(uint32_t member, Dialled dialled);
  // What this rank says to a member that it dials. Once it is connected to all.
  Join join_to(uint32_t member) const;
  // It takes part in no operation from this one on.
  void left(uint32_t member, uint64_t operation) { left_at_[member] = operation; }
  bool has_left(uint32_t member) const;
  // Why an operation is impossible: a member that has left before it. Kind none: all are there.
  Fault missing_for(uint64_t operation) const;
  Fault left_fault(uint32_t member, uint64_t operation) const;

  uint64_t due() { return acceptor_->due(); }
  void count(GroupCounts* out) const;

 private:
  Verdict judge(const Join& join, std::string* refusal) override;
  void enter(const Join& join, std::unique_ptr<Link> link) override { add_peer(join.rank, std::move(link)); }

  bool linked(uint32_t member) const;
  uint32_t channel_of(uint32_t member) const;
  void identify(const std::vector<std::string>& addresses, Join* join) const;
  void dial_members(const Join& join, const std::vector<std::string>& addresses, Deadline deadline);
  void dial_member(uint32_t member, const Join& join, const std::vector<std::string>& addresses, Deadline deadline);
  void wait_for_all(Deadline deadline);
  void end_by(std::shared_ptr<const Fault> fault, bool notify);
  void add_peer(uint32_t member, std::unique_ptr<Link> link);

  const GroupOptions& options_;
  const uint32_t members_;
  EventLoop& loop_;
  Peer::Side& side_;
  const Events events_;
  std::string address_;
  std::atomic<bool> one_host_{false};

  mutable std::mutex mutex_;  // of the fault, which only the loop changes, and of the members that were reached
  ConditionVariable met_changed_;
  std::set<uint32_t> met_;
  std::shared_ptr<const Fault> fault_;
  const std::shared_ptr<const Fault> out_of_memory_;  // made while there is some

  std::vector<std::unique_ptr<Peer>> peers_;  // by member
  std::vector<bool> dropped_;                 // by member
  std::vector<uint64_t> left_at_;             // by member: the first operation that it does not take part in
  GroupCounts gone_counts_;
  Join expected_{};
  bool ready_ = false;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace geartrain
