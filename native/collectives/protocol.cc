#include "collectives/protocol.h"

#include <cstddef>

namespace geartrain {
namespace {

constexpr size_t kMostNamed = 256;
constexpr size_t kMostText = 2048;

std::vector<uint32_t> numbers(std::span<const std::byte> bytes, size_t n) {
  if (n > kMostNamed || bytes.size() < n * sizeof(uint32_t))
    fail(ErrorKind::frame, "its list of members is shorter than announced");
  std::vector<uint32_t> out(n);
  if (n != 0) std::memcpy(out.data(), bytes.data(), n * sizeof(uint32_t));
  return out;
}

}  // namespace

std::string Shape::text() const {
  constexpr const char* names[kCollectives] = {"",           "reduce-scatter", "all-gather",
                                               "all-to-all", "broadcast",      "broadcast"};
  const char* const name = names[static_cast<uint8_t>(collective)];
  std::string out = collective == Collective::reduce_scatter ? std::string(name) + " (" + name_of(op) + ")"
                    : collective == Collective::all_reduce   ? name_of(op)
                                                             : name;
  out += " of " + (collective == Collective::all_to_all ? "" : std::to_string(count) + " ") + name_of(dtype);
  if (collective >= Collective::broadcast) out += " from rank " + std::to_string(root);
  if (wire != dtype) out += std::string(" as ") + name_of(wire);
  if (algorithm != 0) out += " by ring";
  if (!whole) return out;
  const Shape all{whole->count, dtype, whole->wire, whole->op};
  return all.text() + " (a piece of it: " + out + ")";
}

std::vector<std::byte> bytes_of(const Fault& fault) {
  const size_t n = std::min(fault.members.size(), kMostNamed), letters = std::min(fault.text.size(), kMostText);
  const FaultHead head{static_cast<uint32_t>(fault.kind), static_cast<uint32_t>(n)};
  std::vector<std::byte> out;
  append(&out, &head, 1);
  append(&out, fault.members.data(), n);
  append(&out, fault.text.data(), letters);
  return out;
}

Fault fault_from(std::span<const std::byte> bytes) {
  FaultHead head{};
  if (bytes.size() < sizeof head) fail(ErrorKind::frame, "it sent a fault that is too short");
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.kind == 0 || head.kind >= kFaultKinds) fail(ErrorKind::frame, "it sent a fault of no known kind");
  Fault fault;
  fault.kind = static_cast<FaultKind>(head.kind);
  fault.members = numbers(bytes.subspan(sizeof head), head.members);
  const auto text = bytes.subspan(sizeof head + head.members * sizeof(uint32_t));
  fault.text = text_from({reinterpret_cast<const char*>(text.data()), text.size()});
  return fault;
}

std::string text_from(std::span<const char> field) {
  std::string out;
  for (const char code : field) {
    if (code == 0) break;
    out += code >= ' ' && code <= '~' ? code : '?';
  }
  return out;
}

std::vector<std::byte> members_bytes(uint64_t bytes, uint64_t of, const std::vector<uint32_t>& members) {
  const size_t n = std::min(members.size(), kMostNamed);
  const Members head{bytes, of, static_cast<uint32_t>(n), 0};
  std::vector<std::byte> out;
  append(&out, &head, 1);
  append(&out, members.data(), n);
  return out;
}

std::vector<uint32_t> members_from(std::span<const std::byte> payload, uint64_t* bytes, uint64_t* of) {
  Members head{};
  if (payload.size() < sizeof head) fail(ErrorKind::frame, "it sent a status that is too short");
  std::memcpy(&head, payload.data(), sizeof head);
  *bytes = head.bytes;
  *of = head.of;
  return numbers(payload.subspan(sizeof head), head.members);
}

std::string disagreement(uint64_t number, uint32_t rank, const Shape& shape, uint32_t other, const Shape& others) {
  const bool in_order = rank < other;
  return message_of({"ranks disagree at operation ", number, ": rank ", in_order ? rank : other, " asks for the ",
                     (in_order ? shape : others).text(), ", rank ", in_order ? other : rank, " for the ",
                     (in_order ? others : shape).text()});
}

Shape shape_from(const Open& open) {
  if (open.dtype >= kDtypes || open.wire >= kDtypes || open.op >= kOps || open.algorithm > 1 ||
      open.collective >= kCollectives || open.count > (uint64_t{1} << 48) || open.share_bytes > (uint64_t{1} << 48)) {
    fail(ErrorKind::frame, "it opened an operation of no known type");
  }
  Shape shape{open.count,
              static_cast<Dtype>(open.dtype),
              static_cast<Dtype>(open.wire),
              static_cast<Op>(open.op),
              open.algorithm,
              static_cast<Collective>(open.collective),
              open.root};
  if (open.whole_world != 0) {
    shape.whole =
        Whole{open.whole_count, static_cast<Op>(open.whole_op), static_cast<Dtype>(open.whole_wire), open.whole_world};
  }
  if (open.whole_op >= kOps || open.whole_wire >= kDtypes || open.whole_count > (uint64_t{1} << 48) ||
      (!shape.whole && (open.whole_count != 0 || open.whole_op != 0 || open.whole_wire != 0))) {
    fail(ErrorKind::frame, "it opened a stage of no known operation");
  }
  if (shape.collective != Collective::all_reduce && (shape.wire != shape.dtype || shape.algorithm != 0)) {
    fail(ErrorKind::frame, "it opened an operation that is not made so");
  }
  if (shape.wire != shape.dtype && (shape.dtype != Dtype::float32 || !convertible(shape.dtype, shape.wire))) {
    fail(ErrorKind::frame, "it opened an operation whose types do not convert");
  }
  const bool reduced = shape.collective == Collective::all_reduce || shape.collective == Collective::reduce_scatter;
  if (open.address != 0 && (!reduced || shape.wire != shape.dtype || open.share_bytes == 0)) {
    fail(ErrorKind::frame, "it exposes numbers of an operation that has to be sent");
  }
  if (!reduces(shape.op, shape.dtype)) {
    fail(ErrorKind::frame, "it asks for the ", name_of(shape.op), " of ", name_of(shape.dtype));
  }
  return shape;
}

Open open_of(const Shape& shape, uint64_t share_bytes) {
  const Whole whole = shape.whole.value_or(Whole{.world = 0});
  return {shape.count,
          share_bytes,
          static_cast<uint8_t>(shape.dtype),
          static_cast<uint8_t>(shape.wire),
          static_cast<uint8_t>(shape.op),
          shape.algorithm,
          static_cast<uint8_t>(shape.collective),
          0,
          static_cast<uint8_t>(whole.op),
          static_cast<uint8_t>(whole.wire),
          shape.root,
          whole.world,
          whole.count,
          0};
}

}  // namespace geartrain
