// Bindings of the rounds of ranks, and of what exchanges messages for a rank's steps.

#include "python/rank_exchange.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "base/errors.h"
#include "base/interruption.h"
#include "python/messages.h"

namespace geartrain {
namespace {

constexpr const char* kCauseNames[] = {"error", "lost", "timed out", "told", "refused"};

// What a peer has said, which need not be text.
nb::object text_of(const std::string& said) {
  return nb::steal(PyUnicode_DecodeUTF8(said.data(), static_cast<Py_ssize_t>(said.size()), "replace"));
}

std::vector<std::byte> bytes_of(const Message& message) {
  const Bytes found = RankRounds::content_of(message);
  return {found.begin(), found.end()};
}

// One message to every other rank of arrays (ranks), and one from each, as arrays; this rank's own is its part.
nb::list all_to_all(RankRounds& rounds, uint64_t number, const std::vector<In<uint8_t>>& parts, double timeout_s) {
  std::vector<Bytes> sent;
  for (const In<uint8_t>& part : parts) sent.push_back(std::as_bytes(view(part)));
  std::vector<Message> received(sent.size());
  interruptibly([&] { rounds.all_to_all(number, sent, received, Deadline::after(timeout_s)); });
  nb::list made;
  for (size_t rank = 0; rank < received.size(); ++rank) {
    made.append(copied_bytes(rank == rounds.rank() ? sent[rank] : RankRounds::content_of(received[rank])));
  }
  return made;
}

// The halves of the same, with some of the ranks.
void send_parts(RankRounds& rounds, uint64_t number, const std::vector<std::tuple<uint32_t, In<uint8_t>>>& messages,
                double timeout_s, bool beside) {
  std::vector<RankRounds::PartFor> sent;
  for (const auto& [peer, part] : messages) sent.push_back({peer, std::as_bytes(view(part))});
  interruptibly([&] {
    const Deadline deadline = Deadline::after(timeout_s);
    beside ? rounds.send_beside(number, sent, deadline) : rounds.send(number, sent, deadline);
  });
}

nb::list receive_parts(RankRounds& rounds, uint64_t number, const std::vector<uint32_t>& peers, double timeout_s) {
  std::vector<RankRounds::PartFrom> received;
  for (const uint32_t peer : peers) received.push_back({peer, {}});
  interruptibly([&] { rounds.receive(number, received, Deadline::after(timeout_s)); });
  nb::list made;
  for (const RankRounds::PartFrom& each : received) made.append(copied_bytes(RankRounds::content_of(each.message)));
  return made;
}

}  // namespace

std::vector<std::vector<std::byte>> PythonRankExchange::round(std::vector<std::vector<std::byte>> parts) const {
  RankRounds& rounds = *settings_.rounds;
  const std::vector<Bytes> sent(parts.begin(), parts.end());
  std::vector<Message> received(sent.size());
  const Interruption interruption([this] {
    call_python(*unlocked_.load(), [] {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
  });
  rounds.all_to_all(rounds.begin(), sent, received, Deadline::after(settings_.timeout_s));
  std::vector<std::vector<std::byte>> made(sent.size());
  for (size_t rank = 0; rank < made.size(); ++rank) {
    made[rank] = rank == rounds.rank() ? std::move(parts[rank]) : bytes_of(received[rank]);
  }
  return made;
}

std::vector<std::vector<std::byte>> PythonRankExchange::gather(std::span<const std::byte> mine) const {
  return round(std::vector<std::vector<std::byte>>(settings_.rounds->ranks(), {mine.begin(), mine.end()}));
}

std::vector<std::vector<std::byte>> PythonRankExchange::all_to_all(std::vector<std::vector<std::byte>> parts) {
  size_t most = 0;
  for (const auto& each : parts) most = std::max(most, each.size());
  if (settings_.rounds != nullptr && settings_.rounds->carries(most)) return round(std::move(parts));
  std::vector<std::vector<std::byte>> made;
  call_python(*unlocked_.load(), [&] {
    nb::list given;
    for (const auto& each : parts) given.append(copied_bytes(each));
    for (const nb::handle each : nb::object(settings_.all_to_all(given))) {
      const auto bytes = std::as_bytes(view(nb::cast<In<uint8_t>>(each)));
      made.emplace_back(bytes.begin(), bytes.end());
    }
  });
  return made;
}

std::vector<uint64_t> PythonRankExchange::totals(std::span<const uint64_t> mine) {
  std::vector<uint64_t> made;
  if (settings_.totals_by_rounds && by_rounds()) {
    if (mine.size() != settings_.leaders.size()) fail(ErrorKind::schema, "every store has leaders of its shards");
    const auto every = gather(std::as_bytes(mine));
    for (size_t store = 0; store < settings_.leaders.size(); ++store) {
      for (const uint32_t leader : settings_.leaders[store]) {
        if (leader >= every.size()) fail(ErrorKind::schema, "rank ", leader, " is none of the group");
        if (every[leader].size() != mine.size_bytes()) fail(ErrorKind::frame, "rank ", leader, " sent no total");
        std::memcpy(&made.emplace_back(), every[leader].data() + store * sizeof(uint64_t), sizeof(uint64_t));
      }
    }
    return made;
  }
  call_python(*unlocked_.load(), [&] {
    const auto found = nb::cast<In<uint64_t>>(nb::object(settings_.totals(copied_array(mine))));
    made.assign(found.data(), found.data() + found.size());
  });
  return made;
}

std::optional<std::vector<std::vector<std::byte>>> PythonRankExchange::outcomes(std::span<const std::byte> mine) {
  if (!settings_.outcomes_by_rounds || !by_rounds()) return std::nullopt;
  return gather(mine);
}

void bind_rank_exchange(nb::module_& module) {
  nb::class_<RankRounds>(module, "RankRounds")
      .def(nb::init<uint32_t, uint32_t, size_t>(), nb::arg("rank"), nb::arg("ranks"), nb::arg("inline_bytes"))
      .def("add", &RankRounds::add)
      .def("begin", &RankRounds::begin)
      .def("carries", &RankRounds::carries)
      .def("all_to_all", &all_to_all)
      .def("send", &send_parts, nb::arg("number"), nb::arg("messages"), nb::arg("timeout_s"), nb::kw_only(),
           nb::arg("beside") = false)
      .def("receive", &receive_parts)
      // (peer, cause, detail) of the last round, or None where it did not fail
      .def_prop_ro("failure",
                   [](const RankRounds& rounds) -> nb::object {
                     if (!rounds.failure()) return nb::none();
                     const auto& [peer, cause, detail] = *rounds.failure();
                     return nb::make_tuple(peer, kCauseNames[static_cast<size_t>(cause)], text_of(detail));
                   })
      // (peer, reason) of a rank that has said why it leaves, or None
      .def("reason_told",
           [](const RankRounds& rounds, uint32_t first) -> nb::object {
             const auto told = without_gil([&] { return rounds.reason_told(first); });
             if (!told) return nb::none();
             return nb::make_tuple(told->peer, text_of(told->detail));
           })
      .def_prop_ro("sent_bytes", &RankRounds::sent_bytes)
      .def_prop_ro("sent_messages", &RankRounds::sent_messages);
  nb::class_<PythonRankExchange>(module, "RankExchange")
      .def(
          "__init__",
          [](PythonRankExchange* self, RankRounds* rounds, double timeout_s, bool totals_by_rounds,
             bool outcomes_by_rounds, const std::vector<std::vector<uint32_t>>& leaders, const nb::object& all_to_all,
             const nb::object& totals) {
            new (self) PythonRankExchange(
                {rounds, timeout_s, totals_by_rounds, outcomes_by_rounds, leaders, all_to_all, totals});
          },
          nb::arg("rounds").none(), nb::arg("timeout_s"), nb::arg("totals_by_rounds"), nb::arg("outcomes_by_rounds"),
          nb::arg("leaders"), nb::arg("all_to_all"), nb::arg("totals"), nb::keep_alive<1, 2>());
}

}  // namespace geartrain
