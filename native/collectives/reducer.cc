#include "collectives/reducer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "collectives/closing.h"
#include "collectives/reducer_session.h"
#include "transport/security/handshake.h"

namespace geartrain {
namespace {

constexpr double kLastFramesS = 0.5;  // of close(), for the ranks to be told

}  // namespace

class Reducer::Body final : public Acceptor::Host {
 public:
  explicit Body(const ReducerOptions& options)
      : options_(options), loop_("geartrain reduce", [](const std::exception&) {}) {
    // What fails outside of a group's session is a connection that is refused or dropped.
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
    const bool open = loop_.call([&] {
      out = past_;
      out.groups = groups_.size();
      for (const auto& [id, group] : groups_) {
        out.ranks += group->ranks();
        add_counts(*group, &out);
      }
      out.memory_bytes = blocks_.in_use() * sizeof(ChunkBuffer);
    });
    if (!open) fail(ErrorKind::hung_up, "the reducer was closed");
    out.refused = acceptor_->refused();
    return out;
  }

  void close(Deadline deadline) {
    if (loop_.forked() || !closing_.enter(deadline)) return;
    try {
      leave();
    } catch (const std::exception&) {
      // Memory runs out: then without a word.
    }
    acceptor_->close();
    loop_.stop();
    acceptor_->hang_up();
    groups_.clear();  // their ranks see the end now, and not when this is destroyed
    closing_.leave();
  }

 private:
  using GroupId = std::array<uint8_t, 16>;

  static GroupId id_of(const Join& join) {
    GroupId id;
    std::memcpy(id.data(), join.group, id.size());
    return id;
  }

  void leave() {
    const auto wait_until = [&](const auto& passed, const std::function<bool()>& over) {
      for (bool done = false; !done && !passed();) {
        if (!loop_.call([&] { done = over(); })) return;
        if (!done) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    };
    loop_.call([&] { leaving_ = true; });
    wait_until([&] { return closing_.deadline().passed(); },
               [&] {
                 on_time();
                 return groups_.empty();
               });
    loop_.call([&] {
      for (const auto& [id, group] : groups_) {
        group->stop({FaultKind::reducer_lost, "reducer " + address_ + " was stopped", {group->first.member}});
      }
    });
    const Deadline last = Deadline::after(kLastFramesS);
    wait_until(
        [&] { return last.passed(); },
        [&] { return std::all_of(groups_.begin(), groups_.end(), [](const auto& g) { return g.second->drained(); }); });
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
      if (leaving_) *refusal = "this reducer is stopping";
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
    auto place = groups_.find(id_of(join));
    if (place == groups_.end()) {
      auto group = std::make_unique<ReducerSession>(loop_, blocks_, join, options_.max_window_bytes, address_);
      place = groups_.emplace(id_of(join), std::move(group)).first;
      ++past_.groups_served;
    }
    try {
      place->second->add(join.rank, std::move(link));
    } catch (const std::exception& error) {
      place->second->failed(error);
    }
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
  bool leaving_ = false;
  Closing closing_;
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
