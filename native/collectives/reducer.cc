#include "collectives/reducer.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

#include "collectives/reducer_session.h"
#include "transport/security/handshake.h"

namespace geartrain {
class Reducer::Body final : public Acceptor::Host {
 public:
  explicit Body(const ReducerOptions& options) : options_(options), loop_("geartrain reduce") {
    AcceptorOptions acceptor;
    acceptor.host = options.host;
    acceptor.port = options.port;
    acceptor.advertise = {options.host};
    acceptor.secret = options.secret;
    acceptor.shm = options.shm;
    acceptor.max_window_bytes = options.max_window_bytes;
    acceptor_ = std::make_unique<Acceptor>(loop_, acceptor, *this);
    address_ = Address::parse(acceptor_->address()).tcp.front();
    loop_.post([this] { loop_.on_time([this] { return on_time(); }); });
  }

  ~Body() override {
    acceptor_->close();
    loop_.stop();
    groups_.clear();
    acceptor_.reset();
  }

  const std::string& address() const { return address_; }

  ReducerCounts counts() {
    ReducerCounts out;
    call([&] {
      out = past_;
      out.groups = groups_.size();
      for (const auto& [id, group] : groups_) {
        out.ranks += group->ranks();
        add_counts(*group, &out);
      }
      out.memory_bytes = blocks_.in_use() * sizeof(ChunkBuffer);
    });
    out.refused = acceptor_->refused();
    return out;
  }

  void close(Deadline deadline) {
    call([&] { closing_ = true; });
    const auto wait_until = [&](const std::function<bool()>& over) {
      for (bool done = false; !done;) {
        done = true;
        call([&] { done = over(); });
        if (done || deadline.passed()) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    };
    wait_until([&] {
      on_time();
      return groups_.empty();
    });
    call([&] {
      for (const auto& [id, group] : groups_) {
        group->stop({FaultKind::reducer_lost, "reducer " + address_ + " was stopped", {group->first.member}});
      }
    });
    deadline = Deadline::after(1);
    wait_until(
        [&] { return std::all_of(groups_.begin(), groups_.end(), [](const auto& g) { return g.second->drained(); }); });
    acceptor_->close();
    loop_.stop();
  }

 private:
  using GroupId = std::array<uint8_t, 16>;

  static GroupId id_of(const Join& join) {
    GroupId id;
    std::memcpy(id.data(), join.group, id.size());
    return id;
  }

  void call(const std::function<void()>& what) {
    std::mutex mutex;
    std::condition_variable over;
    bool done = false;
    const bool posted = loop_.post([&] {
      what();
      std::lock_guard lock(mutex);
      done = true;
      over.notify_all();
    });
    if (!posted) return;
    std::unique_lock lock(mutex);
    over.wait(lock, [&] { return done; });
  }

  static void add_counts(const ReducerSession& group, ReducerCounts* out) {
    out->operations += group.owner().operations();
    out->reduced_bytes += group.owner().reduced_bytes();
    out->bytes_received += group.bytes_received();
    out->bytes_sent += group.bytes_sent();
  }

  Verdict judge(const Join& join, std::string* refusal) override {
    const auto place = groups_.find(id_of(join));
    if (place == groups_.end()) {
      if (closing_) *refusal = "this reducer is stopping";
      if (groups_.size() >= options_.max_groups) *refusal = "this reducer is at its limit of groups";
      if (join.member < join.world) *refusal = "this is a reducer, and not a rank";
      return refusal->empty() ? Verdict::welcome : Verdict::refused;
    }
    const Join& first = place->second->first;
    if (std::memcmp(join.settings, first.settings, sizeof join.settings) != 0 || join.world != first.world ||
        join.owners != first.owners || join.member != first.member) {
      *refusal = "ranks disagree about shares, reducers or the algorithm of the group";
    } else if (place->second->has(join.rank)) {
      *refusal = "rank " + std::to_string(join.rank) + " is here already";
    }
    return refusal->empty() ? Verdict::welcome : Verdict::refused;
  }

  void enter(const Join& join, std::unique_ptr<Link> link) override {
    auto& group = groups_[id_of(join)];
    if (group == nullptr) {
      group = std::make_unique<ReducerSession>(loop_, blocks_, join, options_.max_window_bytes, address_);
      ++past_.groups_served;
    }
    group->add(join.rank, std::move(link));
  }

  // Removes groups whose ranks have all left.
  uint64_t on_time() {
    for (auto place = groups_.begin(); place != groups_.end();) {
      ReducerSession& group = *place->second;
      if (group.ranks() != 0) {
        ++place;
        continue;
      }
      add_counts(group, &past_);
      past_.groups_failed += group.over();
      place = groups_.erase(place);
    }
    return acceptor_->due();
  }

  const ReducerOptions options_;
  std::string address_;
  ChunkBufferPool blocks_{4096};
  std::map<GroupId, std::unique_ptr<ReducerSession>> groups_;
  ReducerCounts past_;
  bool closing_ = false;
  EventLoop loop_;
  std::unique_ptr<Acceptor> acceptor_;
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
