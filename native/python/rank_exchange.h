// Exchange of a rank with the others of its group: by native rounds where it is connected with all of them, and by the
// group's own functions in Python elsewhere.
#pragma once

#include <atomic>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "fetch/rank_steps.h"
#include "python/bind.h"
#include "python/call_python.h"
#include "transport/rank_rounds.h"

namespace geartrain {

class PythonRankExchange final : public RankExchange {
 public:
  struct Settings {
    RankRounds* rounds = nullptr;  // null: the group has none
    double timeout_s = 0;
    bool totals_by_rounds = false;               // every shard's leader is a rank of its own, and one round reaches all
    bool outcomes_by_rounds = false;             // no row moves between ranks, and one round reaches all
    std::vector<std::vector<uint32_t>> leaders;  // of each store's shards
    nb::object all_to_all, totals;  // list of arrays to list of arrays; total of each store to array of totals
  };
  explicit PythonRankExchange(Settings settings) : settings_(std::move(settings)) {}

  // The thread's GIL for the time of one piece of work. Throws schema where another is at work.
  class Use {
   public:
    Use(PythonRankExchange& exchange, const Unlocked& unlocked) : exchange_(exchange) {
      const Unlocked* none = nullptr;
      if (!exchange.unlocked_.compare_exchange_strong(none, &unlocked)) {
        fail(ErrorKind::schema, "ranks exchange messages for one call at a time");
      }
    }
    ~Use() { exchange_.unlocked_ = nullptr; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    PythonRankExchange& exchange_;
  };

  std::vector<std::vector<std::byte>> all_to_all(std::vector<std::vector<std::byte>> parts) override;
  std::vector<uint64_t> totals(std::span<const uint64_t> mine) override;
  std::optional<std::vector<std::vector<std::byte>>> outcomes(std::span<const std::byte> mine) override;

 private:
  std::vector<std::vector<std::byte>> round(std::vector<std::vector<std::byte>> parts) const;
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine) const;
  bool by_rounds() const { return settings_.rounds != nullptr && settings_.rounds->carries(0); }

  Settings settings_;
  std::atomic<const Unlocked*> unlocked_ = nullptr;
};

}  // namespace geartrain
