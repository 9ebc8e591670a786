// Copier whose copies Python launches and resolves, such as those of a GPU (geartrain/replay/device/transfer.py).
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "fetch/copier.h"
#include "python/bind.h"

namespace geartrain {

// Made and destroyed with the GIL, and so outside of calls of stores: the end of what it holds may run any Python code,
// which may close one.
//
// `transfer` has
//   launch(store, rows, generations, ends, places)   starts copies and returns what tells them; `ends` is None of whole
//                                                    rows, `places` where rows go to places 0, 1, 2, ... of a batch
//                                                    that has no others, `rows` and `generations` where it draws them
//   resolve(launched)                                waits for them: (torn, lengths, starts, steps, versions), and with
//                                                    rows that it has drawn (..., rows, generations, probability)
// and may have
//   draws(n)                                         whether it draws the n rows of a batch
//   copies_all                                       see Copier
class PythonCopier final : public Copier {
 public:
  // Calls Python by a thread that works without the GIL, outside of calls of stores where these are left for it.
  using CallPython = std::function<void(const std::function<void()>&)>;

  // With `first`, rows go to the places from there on of a batch of `of` rows (0: those of the launches).
  explicit PythonCopier(nb::object transfer, uint32_t store = 0, size_t first = 0, size_t of = 0)
      : transfer_(std::move(transfer)), store_(store), first_(static_cast<uint32_t>(first)), of_(of) {
    if (nb::hasattr(transfer_, "draws")) draws_ = transfer_.attr("draws");
    if (nb::hasattr(transfer_, "copies_all")) copies_all_ = nb::cast<bool>(transfer_.attr("copies_all"));
  }
  void work_in(CallPython call) { call_ = std::move(call); }

  void launch(const RowsToCopy& rows) override {
    drawn_ = rows.rows.empty();
    n_ = rows.places.size();
    call_([&] {
      launched_ = transfer_.attr("launch")(rows.store + store_, drawn_ ? nb::none() : copied_array(rows.rows),
                                           drawn_ ? nb::none() : copied_array(rows.generations),
                                           rows.ends.empty() ? nb::none() : copied_array(rows.ends), places_of(rows));
    });
  }
  CopiedRows resolve() override {
    CopiedRows made;
    call_([&] {
      const nb::object launched = std::move(launched_);
      const nb::object found = transfer_.attr("resolve")(launched);
      made = {.torn = taken<uint8_t>(found, 0),
              .lengths = taken<int32_t>(found, 1),
              .starts = taken<int32_t>(found, 2),
              .steps = taken<int32_t>(found, 3),
              .versions = taken<int64_t>(found, 4),
              .rows = {},
              .generations = {},
              .probability = {}};
      if (!drawn_) return;
      made.rows = taken<uint32_t>(found, 5);
      made.generations = taken<uint32_t>(found, 6);
      made.probability = taken<double>(found, 7);
    });
    return made;
  }
  bool draws(size_t n) override {
    if (!draws_.is_valid()) return false;
    bool made = false;
    call_([&] { made = nb::cast<bool>(draws_(n)); });
    return made;
  }
  bool copies_all() const override { return copies_all_; }

 private:
  nb::object places_of(const RowsToCopy& rows) const {
    if (first_ == 0 && (of_ == 0 || of_ == rows.of) && rows.places.size() == rows.of) {
      size_t i = 0;
      while (i < rows.of && rows.places[i] == i) ++i;
      if (i == rows.of) return nb::none();
    }
    std::vector<uint32_t> places(rows.places.begin(), rows.places.end());
    for (uint32_t& each : places) each += first_;
    return to_numpy(std::move(places));
  }
  template <typename T>
  std::vector<T> taken(const nb::object& from, size_t at) const {
    const auto array = nb::cast<In<T>>(nb::object(from[at]));
    if (array.size() != n_) fail(ErrorKind::schema, n_, " rows were asked for, ", array.size(), " were given");
    return {array.data(), array.data() + n_};
  }

  nb::object transfer_, draws_, launched_;
  uint32_t store_, first_;
  size_t of_;
  bool copies_all_ = false, drawn_ = false;
  size_t n_ = 0;
  CallPython call_;
};

}  // namespace geartrain
