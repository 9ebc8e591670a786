// Wire protocol between ranks and reducers, after the handshake (transport/security/handshake.h) has authenticated
// them.
//
//   rank (dials)                                       owner: another rank, or a reducer
//   Join     group, rank, world, settings        --->
//                                                <---  Welcome   the window granted, or the reason of a refusal
//
// From then on both sides send frames, each a header and a payload right behind it:
//
//    0      4      6      8               16               24               32
//   +------+------+------+---------------+----------------+----------------+ - - - - - - - - - -
//   | GTC1 | kind | zero | operation     | offset         | bytes          | payload: `bytes`
//   +------+------+------+---------------+----------------+----------------+ - - - - - - - - - -
//
//   open    rank -> owner    begins an operation: type, op, number of elements (Open). Before its first part
//   part    rank -> owner    a piece of the rank's numbers of this owner's share; `offset` counts bytes in the share
//   result  owner -> rank    a piece of the share, reduced. An empty share is answered by one empty result
//   credit  owner -> rank    instead of a result that the rank does not get: the share is done up to `offset`
//   taken   rank -> owner    of results that are no answer to parts: the rank has them up to `offset`
//   expose  owner -> rank    instead of results: where they are in the owner's memory (ExposedShare), to be read
//   unreadable  rank -> owner    it cannot read what is exposed from `offset` on: results instead
//   unreadable_part  owner -> rank    it cannot read the rank's numbers from `offset` on: parts instead
//   ring    rank -> next     a piece of the stream that goes around the ring (ring_allreduce.h)
//   query   which ranks does this one wait for?     status   the answer: Members, the least advanced
//   lost    rank -> rank     it has lost a reducer, of which it has the first `offset` bytes of results (takeover.h)
//   back    rank -> rank     it is connected with that reducer again
//   resume  rank -> rank     it has begun `offset` operations, and begins none until all ranks have said so
//   complete  rank -> rank   it has done the operations below `operation`; the answer, once that is so, is the same
//   fault   the group is over, with the reason (Fault): forwarded to all, unchanged
//   bye     an orderly end: the sender has done the operations below `operation`, and no other
//
// A rank whose owner may read its memory says in the open where its numbers are, and sends no parts: they stay as they
// are until the result for the same place, or the credit for all of them, has come. Results are exposed to such a rank.
//
// Which ranks send parts of a share, and which get results, depends on the collective (Collective). A rank that does
// not send opens all the same: its open is what allows the owner to send more than kEagerBytes, or to expose.
//
// Pieces of one share come in order and never cross a multiple of the group's chunk (chunk_bytes). Operations are
// numbered from 0, in the order of the calls, which is the same on all ranks. Numbers are little-endian.
//
// Input is not trusted. check() passes only what could be a frame; the owner then accepts only what it expects
// (share_owner.h): the right operation, the right offset, no more bytes than announced. Anything else ends the
// connection that it came on. Memory is allocated per connection, up to the window granted, whatever it sends.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/errors.h"
#include "collectives/reduce_kernels.h"

namespace geartrain {

constexpr uint64_t kGrain = 16;  // elements: no vector of them lies in two shares of an array

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kCollectiveMagic = 0x31435447;  // "GTC1"
constexpr uint32_t kCollectiveVersion = 9;
constexpr uint32_t kMostMembers = 4096;       // ranks and reducers of a group
constexpr uint32_t kMostControlBytes = 4096;  // of a payload that is not data
constexpr uint32_t kChunkBytes = 16 << 10;    // what is reduced at once, and the most that one frame carries
constexpr uint64_t kFirstBytes = 4 << 10;     // of a share, reduced before its first chunk is there
constexpr uint64_t kEagerBytes = 128 << 10;   // of results, to a rank that has not opened their operation
constexpr uint64_t kExposedBytes = 1 << 20;   // the most that is read from another process at once

enum class FrameKind : uint16_t {
  join = 1,
  welcome,
  open,
  part,
  result,
  ring,
  query,
  status,
  fault,
  bye,
  credit,
  taken,
  expose,
  unreadable,
  unreadable_part,
  lost,
  back,
  resume,
  complete
};

// Of a frame's `operation`: it is one of the ranks' own in place of the reducer of that index (takeover.h).
constexpr uint64_t kTakeover = uint64_t{1} << 63;
constexpr int kReducerShift = 48;
constexpr uint64_t takeover_operation(uint32_t reducer, uint64_t operation) {
  return kTakeover | uint64_t{reducer} << kReducerShift | operation;
}

struct WireHeader {
  uint32_t magic;
  uint16_t kind;
  uint16_t reserved;
  uint64_t operation;
  uint64_t offset;
  uint64_t bytes;
};
static_assert(sizeof(WireHeader) == 32 && offsetof(WireHeader, operation) == 8 && offsetof(WireHeader, bytes) == 24);

struct Join {
  uint32_t magic;
  uint32_t version;
  uint8_t group[16];     // which of the groups that a reducer serves; its addresses' digest, so never the same twice
  uint8_t settings[16];  // digest of shares, algorithm and so on: must be the same on all ranks
  uint32_t rank;
  uint32_t world;
  uint32_t member;      // the destination: a rank, or world + the reducer's index
  uint32_t owners;      // how many have a share: it sets the chunk
  uint64_t ring_bytes;  // of each ring in the memory that comes with this; 0 over TCP
  uint32_t channel;     // to a reducer: how many reducers before it in the group's list have the same address
  char name[60];        // of the group, for messages
};
static_assert(sizeof(Join) == 128 && offsetof(Join, ring_bytes) == 56 && offsetof(Join, channel) == 64);

struct Welcome {
  uint32_t magic;
  uint32_t version;
  uint64_t max_window_bytes;  // how far ahead of the results a rank may run, over all shares
  char refusal[240];          // the reason; empty: welcome. Nothing follows a refusal
};
static_assert(sizeof(Welcome) == 256);

// Each share of an array has an owner. A collective is which ranks contribute to a share, and which get it:
//
//                    owners             contribute to a share     get it
//   all_reduce       ranks, reducers    all                       all
//   reduce_scatter   ranks              all                       its owner
//   all_gather       ranks              its owner                 all
//   all_to_all       ranks              its owner                 each another part of it
//   broadcast        all but the root   the root                  all but the root
//   one_host_broadcast   the root       the root                  all but the root
//
// The last is the broadcast of ranks on one host, where a relay would only copy once more.
enum class Collective : uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, one_host_broadcast };
constexpr uint8_t kCollectives = 6;

constexpr bool is_direct(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::all_to_all ||
         collective == Collective::one_host_broadcast;
}

// The all-reduce over several groups that an operation is a stage of, for a piece of its array.
struct Whole {
  uint64_t count = 0;  // elements of its array
  Op op = Op::sum;
  Dtype wire = Dtype::float32;  // between hosts
  uint32_t world = 1;           // ranks of all groups: what an average is divided by, in this group too

  bool operator==(const Whole&) const = default;
};

// What all ranks must agree on.
struct Shape {
  uint64_t count = 0;  // elements, of all shares; 0 for all_to_all, where ranks differ
  Dtype dtype = Dtype::float32, wire = Dtype::float32;
  Op op = Op::sum;
  uint8_t algorithm = 0;
  Collective collective = Collective::all_reduce;
  uint32_t root = 0;
  std::optional<Whole> whole = std::nullopt;

  // Whether owners send from the caller's memory, and reduce nothing.
  bool direct() const { return is_direct(collective); }
  bool operator==(const Shape&) const = default;
  uint64_t wire_bytes() const { return count * bytes_of(wire); }
  std::string text() const;
};

struct Open {
  uint64_t count;
  uint64_t share_bytes;  // of the owner that this is sent to
  uint8_t dtype, wire, op, algorithm;
  uint8_t collective;
  uint8_t reads;  // 1: the sender can read the owner's memory, and results may be exposed to it
  uint8_t whole_op, whole_wire;
  uint32_t root;
  uint32_t whole_world;  // 0: not a stage of another operation
  uint64_t whole_count;
  uint64_t address;  // of the sender's numbers of this share, in its memory; 0: they come in parts
};
static_assert(sizeof(Open) == 48 && offsetof(Open, address) == 40);

// `bytes` at an address of the owner, which keeps them until the rank has reported that it took them; none: it has
// taken them back, and the reason follows.
struct ExposedShare {
  uint64_t address, bytes;
};
static_assert(sizeof(ExposedShare) == 16);

// Why a group is over. The kinds are those of the Python errors.
enum class FaultKind : uint32_t { none, rank_lost, reducer_lost, timed_out, disagree, protocol, aborted, closed };
constexpr uint32_t kFaultKinds = 8;

struct Fault {
  FaultKind kind = FaultKind::none;
  std::string text;
  std::vector<uint32_t> members;  // the members responsible: ranks, and world + index for reducers
};

struct FaultHead {
  uint32_t kind;
  uint32_t members;  // u32 each, then the text
};
static_assert(sizeof(FaultHead) == 8);

struct Members {
  uint64_t bytes;    // bytes received from the least advanced of them
  uint64_t of;       // of this many
  uint32_t members;  // u32 each
  uint32_t reserved;
};
static_assert(sizeof(Members) == 24);

// --- helpers ---------------------------------------------------------------------------------------------------------

// Text into a field of fixed size, cut off and ended by a zero.
template <size_t N>
void put_text(char (&field)[N], const std::string& text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memset(field, 0, N);
  std::memcpy(field, text.data(), n);
}
// Text from such a field, reduced to printable characters.
std::string text_from(std::span<const char> field);

// Appends the values' bytes to a message.
template <typename T>
void append(std::vector<std::byte>* to, const T* values, size_t n) {
  const size_t before = to->size();
  to->resize(before + n * sizeof(T));
  if (n != 0) std::memcpy(to->data() + before, values, n * sizeof(T));
}

inline WireHeader frame_of(FrameKind kind, uint64_t operation, uint64_t offset, uint64_t bytes) {
  return {kCollectiveMagic, static_cast<uint16_t>(kind), 0, operation, offset, bytes};
}

// Whether its payload is numbers of an array.
inline bool is_data(const WireHeader& header) {
  const auto kind = static_cast<FrameKind>(header.kind);
  return kind == FrameKind::part || kind == FrameKind::result || kind == FrameKind::ring;
}

// Throws frame when this cannot be the beginning of a frame.
inline void check(const WireHeader& header) {
  const auto kind = static_cast<FrameKind>(header.kind);
  const bool empty = kind == FrameKind::credit || kind == FrameKind::taken || kind == FrameKind::unreadable ||
                     kind == FrameKind::unreadable_part || kind == FrameKind::lost || kind == FrameKind::back ||
                     kind == FrameKind::resume || kind == FrameKind::complete;
  if (header.magic != kCollectiveMagic || header.reserved != 0 || kind < FrameKind::open ||
      kind > FrameKind::complete || (empty && header.bytes != 0)) {
    fail(ErrorKind::frame, "it sent what is not a frame");
  }
  const uint32_t most = is_data(header) ? kChunkBytes : kMostControlBytes;
  if (header.bytes > most) fail(ErrorKind::frame, "it sent a frame of ", header.bytes, " bytes, the limit is ", most);
}

// How many members own a share.
inline uint32_t owners_of(std::span<const double> shares) {
  return static_cast<uint32_t>(std::ranges::count_if(shares, [](double share) { return share > 0; }));
}
// With many owners chunks are smaller, so that one from each still fits into a small window.
constexpr uint64_t chunk_bytes(uint32_t owners) {
  uint64_t chunk = kChunkBytes;
  while (chunk > 4096 && chunk * owners > (256 << 10)) chunk /= 2;
  return chunk;
}

// The error text of two ranks that disagree: the same on both, the lower rank first.
std::string disagreement(uint64_t number, uint32_t rank, const Shape& shape, uint32_t other, const Shape& others);

std::vector<std::byte> bytes_of(const Fault& fault);
Fault fault_from(std::span<const std::byte> bytes);  // throws frame
std::vector<std::byte> members_bytes(uint64_t bytes, uint64_t of, const std::vector<uint32_t>& members);
std::vector<uint32_t> members_from(std::span<const std::byte> payload, uint64_t* bytes, uint64_t* of);
Shape shape_from(const Open& open);  // throws frame
Open open_of(const Shape& shape, uint64_t share_bytes);

}  // namespace geartrain
