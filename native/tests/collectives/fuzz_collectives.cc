// Fuzzer of a group's members: arbitrary bytes to a reducer and to a rank that waits for results are accepted as far as
// the protocol allows, or end their connection, and nothing else happens.

#include <sys/socket.h>
#include <future>

#include "collectives/group_side.h"
#include "collectives/reducer_session.h"
#include "collectives/sharded_allreduce.h"
#include "tests/support/fuzz.h"

namespace geartrain {
namespace {

// Shares of more than one chunk, and small enough that a mutated input still reaches the operations of every kind.
constexpr uint64_t kCount = 8'448;

// What a peer sends. Data of an input's frames is not in it, unless it is `raw`: numbers are no decisions, and an input
// of a hundred kilobytes of them is hardly ever changed where it matters.
std::vector<std::span<const uint8_t>> sent(std::span<const uint8_t> input, bool raw) {
  static const Input numbers(kChunkBytes, 1);
  std::vector<std::span<const uint8_t>> parts;
  size_t begun = 0, at = 0;
  const auto end_part = [&] {
    if (at != begun) parts.push_back(input.subspan(begun, at - begun));
    begun = at;
  };
  while (!raw && input.size() - at >= sizeof(WireHeader)) {
    WireHeader header;
    std::memcpy(&header, input.data() + at, sizeof header);
    at += sizeof header;
    const auto kind = static_cast<FrameKind>(header.kind);
    if (kind == FrameKind::part || kind == FrameKind::result || kind == FrameKind::ring) {
      end_part();
      if (header.bytes != 0) parts.push_back(std::span(numbers).first(std::min<uint64_t>(header.bytes, kChunkBytes)));
    } else {
      at += std::min<size_t>(header.bytes, input.size() - at);
    }
  }
  at = input.size();
  end_part();
  return parts;
}

// A link that reads what was sent in pieces of changing size and discards what is written.
class FuzzLink final : public Link {
 public:
  FuzzLink(Descriptor socket, Descriptor other_end, std::vector<std::span<const uint8_t>> sent)
      : Link(std::move(socket)), other_end_(std::move(other_end)), sent_(std::move(sent)) {}
  size_t write(std::span<struct iovec> parts) override {
    size_t bytes = 0;
    for (const struct iovec& part : parts) bytes += part.iov_len;
    return bytes;
  }
  size_t read(std::span<struct iovec> parts) override {
    size_t done = 0;
    const size_t piece = size_t{1} + 977 * (turn_++ % 40);
    if (next_ == sent_.size()) fail(ErrorKind::peer_lost, "connection closed");
    for (const struct iovec& part : parts) {
      for (size_t filled = 0; filled < part.iov_len && done < piece && next_ < sent_.size();) {
        std::span<const uint8_t>& from = sent_[next_];
        const size_t n = std::min({part.iov_len - filled, piece - done, from.size()});
        std::memcpy(static_cast<std::byte*>(part.iov_base) + filled, from.data(), n);
        from = from.subspan(n);
        filled += n;
        done += n;
        next_ += from.empty();
      }
    }
    return done;
  }
  const char* name() const override { return "fuzz"; }

 private:
  const Descriptor other_end_;                  // open and idle
  std::vector<std::span<const uint8_t>> sent_;  // none is empty
  size_t next_ = 0, turn_ = 0;
};

std::unique_ptr<Link> link_of(std::span<const uint8_t> input, bool raw) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
  return std::make_unique<FuzzLink>(Descriptor(pair[0]), Descriptor(pair[1]), sent(input, raw));
}

EventLoop& quiet_loop() {
  static EventLoop loop("fuzz", [](const std::exception&) {});
  return loop;
}

// A rank with one operation of every kind in flight, whose other rank is the fuzzer.
class Rank final : public Peer::Side, public ShardedAllreduce::Host, public ShareOwner::Host {
 public:
  Rank(std::span<const uint8_t> input, bool raw)
      : owner_(blocks_, *this, 2, 0, chunk_bytes(2), 1 << 20), shares_(blocks_, *this, {0.5, 0.5}, 0, 1 << 20) {
    for (uint32_t kind = 0; kind < kKinds; ++kind) begin(kind);
    peer_ = std::make_unique<Peer>(quiet_loop(), link_of(input, raw), 1, *this);
    peer_->kick();
    while (!peer_->closed()) {
      peer_->look();
      if (std::exchange(again_, false)) owner_.go_on();
    }
  }
  std::span<std::byte> room(Peer&, const WireHeader& header) override {
    if (static_cast<FrameKind>(header.kind) == FrameKind::part) return owner_.room(1, header);
    if (static_cast<FrameKind>(header.kind) != FrameKind::result) fail(ErrorKind::frame, "no result");
    return shares_.room(1, header);
  }
  void took(Peer& peer, const WireHeader& header, std::span<std::byte> payload) override {
    const auto kind = static_cast<FrameKind>(header.kind);
    uint64_t bytes, of;
    if (kind == FrameKind::result) shares_.took(1, header, payload);
    if (kind == FrameKind::credit) shares_.took_credit(1, header);
    if (kind == FrameKind::taken) owner_.took_taken(1, header);
    if (kind == FrameKind::unreadable) owner_.took_unreadable(1, header);
    if (kind == FrameKind::unreadable_part) shares_.took_unreadable_part(1, header);
    if (kind == FrameKind::expose) took_exposed(header, payload);
    if (kind == FrameKind::part) owner_.took(1, header);
    if (kind == FrameKind::open && header.bytes == sizeof(Open)) {
      Open open;
      std::memcpy(&open, payload.data(), sizeof open);
      owner_.open(1, header.operation, open);
    }
    if (kind == FrameKind::query) owner_.least_advanced(header.operation, &bytes, &of);
    if (kind == FrameKind::fault) fault_from(payload);
    if (kind == FrameKind::status) members_from(payload, &bytes, &of);
    if (disagree_) peer.close();
  }
  bool next(Peer&, OutFrame* frame) override { return !disagree_ && (owner_.next(1, frame) || shares_.next(1, frame)); }
  void lost(Peer&, const std::string&) override {}
  void failed(Peer&, const std::exception&) noexcept override { std::abort(); }
  std::span<std::byte> discard() noexcept override { return {}; }
  void open(uint32_t, uint64_t, const Open&) override {}
  bool exposes_to(uint32_t) override { return true; }
  // No address of the input is ever read. It says what becomes of the attempt.
  ReadExposed read(uint32_t, uint64_t address, std::span<std::byte> into) override {
    std::memset(into.data(), 1, into.size());
    const uint64_t what = address >> 56;
    return what == 1 ? ReadExposed::denied : what == 2 ? ReadExposed::withdrawn : ReadExposed::read;
  }
  void unreadable_part(uint32_t, uint64_t, uint64_t) override {}
  void go_on() override { again_ = true; }
  void parts_for(uint32_t) override { kick(); }
  void results_for(uint32_t) override { kick(); }
  void taken(uint32_t, uint64_t, uint64_t) override {}
  void completed(const std::shared_ptr<Work>&) override {}
  void deliver(uint64_t operation, uint64_t offset, std::span<const std::byte> result) override {
    shares_.deliver(operation, offset, result);
  }
  void served(uint64_t operation) override { shares_.served(operation); }
  CongestionWindow* window() override { return &shares_.window(); }
  void disagree(const std::string&, std::vector<uint32_t>) override { disagree_ = true; }

  // The shape of the operation of that number; both ranks have as much of it.
  static Shape shape(uint32_t kind) {
    const uint32_t collective = kind < kExposed ? std::min(kind, 4u) : kind - kExposed;
    Shape out{kCount, Dtype::float32, Dtype::float32, Op::sum, 0, static_cast<Collective>(collective), 0};
    if (out.collective == Collective::all_to_all) out.count = 0;
    out.root = kind == 5;
    return out;
  }
  // Two broadcasts, from each rank; then an all-reduce and a reduce-scatter whose numbers are exposed.
  static constexpr uint32_t kExposed = 6, kKinds = 8;

 private:
  void begin(uint32_t kind) {
    const Shape asked = shape(kind);
    static std::vector<std::byte> arrays(2 * kKinds * kCount * 4);  // of all ranks, one after the other
    std::byte* const at = arrays.data() + 2 * kind * kCount * 4;
    const std::vector<Segment> in = {{at, kCount / 2}, {at + kCount * 2, kCount / 2}};
    const std::vector<Segment> out = {{at + kCount * 4, kCount / 2}, {at + kCount * 6, kCount / 2}};
    const bool halves = asked.direct() || asked.collective == Collective::reduce_scatter;
    auto work = halves ? std::make_shared<Work>(asked, in, asked.direct() ? out : std::vector{out[0]}, 60)
                       : std::make_shared<Work>(asked, at, at, 60);
    work->number = kind;
    const bool exposed = kind >= kExposed;
    const ShardedAllreduce::Own own = shares_.begin(work, exposed);
    if (asked.direct()) {
      owner_.send_local(kind, asked, in);
    } else if (own.used) {
      owner_.open_local(kind, asked, own.bytes, own.numbers, exposed ? own.result : nullptr);
    }
  }
  void took_exposed(const WireHeader& header, std::span<const std::byte> payload) {
    ExposedShare exposed;
    if (payload.size() != sizeof exposed) fail(ErrorKind::frame, "malformed");
    std::memcpy(&exposed, payload.data(), sizeof exposed);
    if (exposed.bytes == 0 || shares_.declined(1, header.operation)) return;
    if (exposed.bytes > kExposedBytes) fail(ErrorKind::frame, "too much");
    const WireHeader result = frame_of(FrameKind::result, header.operation, header.offset, exposed.bytes);
    const std::span<std::byte> into = shares_.exposed_room(1, result);
    const ReadExposed found = read(1, exposed.address, into);
    if (found == ReadExposed::read) shares_.took(1, result, into, true);
    if (found == ReadExposed::denied) shares_.decline(1, header);
  }
  void kick() {
    if (peer_ != nullptr) peer_->kick();
  }

  ChunkBufferPool blocks_;
  ShareOwner owner_;
  ShardedAllreduce shares_;
  bool disagree_ = false, again_ = false;
  std::unique_ptr<Peer> peer_;
};

// A link to a reducer that is back, and says nothing more.
class SilentLink final : public Link {
 public:
  SilentLink(Descriptor socket, Descriptor other_end) : Link(std::move(socket)), other_end_(std::move(other_end)) {}
  size_t write(std::span<struct iovec> parts) override {
    size_t bytes = 0;
    for (const struct iovec& part : parts) bytes += part.iov_len;
    return bytes;
  }
  size_t read(std::span<struct iovec>) override { return 0; }
  const char* name() const override { return "fuzz"; }

 private:
  const Descriptor other_end_;
};

// Rank 0 of two, of a group that outlives its reducer, with operations in progress; rank 1 and the reducer are the
// fuzzer. What it does later is done on the loop between two rounds.
class Outliving {
 public:
  static GroupOptions options_of() {
    GroupOptions out;
    out.world = 2;
    out.reducers = {"127.0.0.1:1"};
    out.shares = {0.25, 0.25, 0.5};
    out.outlives_reducers = true;
    out.shm = false;
    out.fixed_window_bytes = 1 << 20;
    return out;
  }
  static Shape shape(uint32_t operation) {
    Shape out;
    out.count = operation == 1 ? 100 : kCount;
    out.wire = operation == 2 ? Dtype::bfloat16 : Dtype::float32;
    return out;
  }
  static constexpr uint32_t kOperations = 4;

  Outliving(std::span<const uint8_t> reducer, std::span<const uint8_t> rank, bool raw)
      : options_(options_of()), side_(options_, quiet_loop(), [] {}) {
    quiet_loop().call([&] {
      enter(1, link_of(rank, raw));
      enter(2, link_of(reducer, raw));
      for (uint32_t i = 0; i < kOperations; ++i) {
        const Shape asked = shape(i);
        auto& array = arrays_.emplace_back(asked.count * bytes_of(asked.dtype));
        side_.begin(std::make_shared<Work>(asked, array.data(), array.data(), 60));
      }
    });
    for (bool any = true; any;) {
      quiet_loop().call([&] { any = round(); });
    }
    quiet_loop().call([&] {
      side_.members().end({FaultKind::closed, "over", {}}, false);
      side_.members().drop_peers();
    });
  }

 private:
  void enter(uint32_t member, std::unique_ptr<Link> link) {
    Join join{};
    join.rank = member;
    static_cast<Acceptor::Host&>(side_.members()).enter(join, std::move(link));
  }
  bool round() {
    bool any = false;
    for (const uint32_t member : {2u, 1u}) {
      Peer* const peer = side_.members().peer(member);
      if (peer == nullptr || peer->closed()) continue;
      const uint64_t before = peer->bytes_received();
      any |= peer->look() || peer->bytes_received() != before;
    }
    for (const Redial::Wanted& wanted : side_.wanted()) {
      int pair[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
      Dialled dialled;
      dialled.link = std::make_unique<SilentLink>(Descriptor(pair[0]), Descriptor(pair[1]));
      dialled.welcome.max_window_bytes = 1 << 20;
      side_.reached(wanted.member, std::move(dialled));
      any = true;
    }
    return any && !side_.members().over();
  }

  const GroupOptions options_;
  std::vector<std::vector<std::byte>> arrays_;
  GroupSide side_;
};

void serve(Reader reader, bool raw) {
  ChunkBufferPool blocks;
  Join join{};
  join.world = 2;
  join.owners = 1;
  join.member = 2;
  const auto first = reader.take(reader.take<uint16_t>());
  ReducerSession group(quiet_loop(), blocks, join, 256 << 10, "127.0.0.1:1");
  group.add(0, link_of(first, raw));
  group.add(1, link_of(reader.rest(), raw));
  // Both in turns, until both are closed.
  for (bool any = true; any;) {
    any = false;
    for (const uint32_t rank : {0u, 1u}) {
      if (Peer* const peer = group.peer(rank); peer != nullptr && !peer->closed()) any |= peer->look() || true;
    }
  }
}

template <typename T>
void frame(Input* input, FrameKind kind, uint64_t operation, uint64_t offset, const T& payload, uint32_t bytes) {
  append(input, frame_of(kind, operation, offset, bytes));
  if (kind == FrameKind::part || kind == FrameKind::result) return;
  const auto* from = reinterpret_cast<const uint8_t*>(&payload);
  for (uint32_t i = 0; i < bytes; ++i) input->push_back(i < sizeof payload ? from[i] : 1);
}

Input rank_input(uint64_t count) {
  Input input;
  for (uint64_t operation = 0; operation < 2; ++operation) {
    frame(&input, FrameKind::open, operation, 0, Open{count, count * 4, 0, 0, 0, 0, 0}, sizeof(Open));
    for (uint64_t at = 0; at < count * 4; at += kChunkBytes) {
      const auto bytes = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, count * 4 - at));
      frame(&input, FrameKind::part, operation, at, 0, bytes);
    }
  }
  frame(&input, FrameKind::query, 1, 0, 0, 0);
  frame(&input, FrameKind::bye, 0, 0, 0, 0);
  return input;
}

constexpr uint8_t kRaw = 2, kOutlives = 4;

// What the reducer and rank 1 of an Outliving send: the reducer ends after so many results, rank 1 says that it has
// lost it at `position`, does its part of the ranks' own operations, has it back, and leaves.
Input outliving(uint64_t results, uint64_t position, int turns) {
  Input reducer, rank;
  for (uint64_t i = 0; i < results; ++i) frame(&reducer, FrameKind::result, 0, i * kFirstBytes, 0, kFirstBytes);
  for (uint32_t i = 0; i < Outliving::kOperations; ++i) {
    const Shape shape = Outliving::shape(i);
    const std::vector<uint64_t> starts = divide_array(shape.count, shape.wire, std::vector{0.25, 0.25, 0.5}, i);
    const uint64_t mine = (starts[1] - starts[0]) * bytes_of(shape.wire);
    if (starts[2] == starts[0] && mine == 0) continue;
    const Open open = open_of(shape, mine);
    frame(&rank, FrameKind::open, i, 0, open, sizeof open);
    for (uint64_t at = 0; at < mine; at += kChunkBytes) {
      const auto bytes = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, mine - at));
      frame(&rank, FrameKind::part, i, at, 0, bytes);
      frame(&rank, FrameKind::result, i, at, 0, bytes);
    }
  }
  for (int turn = 0; turn < turns; ++turn) {
    frame(&rank, FrameKind::lost, takeover_operation(0, 0), turn == 0 ? position : 0, 0, 0);
    for (uint64_t number = 0; number < 3; ++number) {
      Shape shape = Outliving::shape(0);
      shape.count = 4096;
      const Open open = open_of(shape, shape.wire_bytes() / 2);
      frame(&rank, FrameKind::open, takeover_operation(0, number), 0, open, sizeof open);
      frame(&rank, FrameKind::part, takeover_operation(0, number), 0, 0, static_cast<uint32_t>(open.share_bytes));
      frame(&rank, FrameKind::result, takeover_operation(0, number), 0, 0, static_cast<uint32_t>(open.share_bytes));
    }
    frame(&rank, FrameKind::back, takeover_operation(0, 0), 0, 0, 0);
    frame(&rank, FrameKind::resume, takeover_operation(0, 0), Outliving::kOperations + turn, 0, 0);
  }
  frame(&rank, FrameKind::complete, Outliving::kOperations, 0, 0, 0);
  frame(&rank, FrameKind::bye, Outliving::kOperations, 0, 0, 0);
  Input out = {kOutlives};
  append(&out, static_cast<uint16_t>(reducer.size()));
  out.insert(out.end(), reducer.begin(), reducer.end());
  out.insert(out.end(), rank.begin(), rank.end());
  return out;
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  std::vector<Input> seeds;
  for (const uint64_t count : {0u, 1u, 5000u}) {
    const Input one = rank_input(count);
    Input input = {0};
    append(&input, static_cast<uint16_t>(one.size()));
    input.insert(input.end(), one.begin(), one.end());
    input.insert(input.end(), one.begin(), one.end());
    seeds.push_back(input);
  }
  Input results = {1};
  for (uint64_t at = 0; at < kCount * 2; at += kChunkBytes) {
    const auto bytes = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, kCount * 2 - at));
    frame(&results, FrameKind::result, 0, at, 0, bytes);
  }
  seeds.push_back(results);
  for (const uint64_t count : {0u, 1u, 2u}) {
    for (const int turns : {1, 2}) seeds.push_back(outliving(count, (2 - count) * kFirstBytes, turns));
  }
  // All that the other rank of a Rank sends, and more than it expects.
  Input member = {1};
  for (uint64_t kind = 0; kind < Rank::kKinds; ++kind) {
    Open open =
        open_of(Rank::shape(static_cast<uint32_t>(kind)), kCount * (kind < 4 || kind >= Rank::kExposed ? 2 : 4));
    open.reads = kind == 2;
    frame(&member, FrameKind::open, kind, 0, open, sizeof open);
    for (uint64_t at = 0; at < open.share_bytes; at += kChunkBytes) {
      const uint64_t bytes = std::min<uint64_t>(kChunkBytes, open.share_bytes - at);
      if (kind < 2 || kind == 5) frame(&member, FrameKind::part, kind, at, 0, static_cast<uint32_t>(bytes));
      if (kind != 1 && kind != 4) frame(&member, FrameKind::result, kind, at, 0, static_cast<uint32_t>(bytes));
      if (kind == 1 || kind == 4) frame(&member, FrameKind::credit, kind, at + bytes, 0, 0);
      if (kind == 2 || kind == 3) frame(&member, FrameKind::taken, kind, at + bytes, 0, 0);
    }
  }
  seeds.push_back(member);
  // Numbers that are exposed: to an owner that reads none; and to one that reads them, may not, or finds them
  // withdrawn, with results that are exposed as well.
  for (const uint64_t what : {0, 1, 2, 3}) {
    Input reader = {1};
    const uint64_t first = what == 3 ? 0 : Rank::kExposed;
    for (const uint64_t kind : {first, first + 1}) {
      Open open = open_of(Rank::shape(static_cast<uint32_t>(kind)), kCount * 2);
      open.reads = 1;
      open.address = what << 56 | 4096;
      frame(&reader, FrameKind::open, kind, 0, open, sizeof open);
      for (uint64_t at = 0; at < open.share_bytes && (what == 1 || what == 3); at += kChunkBytes) {
        const uint64_t bytes = std::min<uint64_t>(kChunkBytes, open.share_bytes - at);
        frame(&reader, FrameKind::part, kind, at, 0, static_cast<uint32_t>(bytes));
      }
      if (kind % 2 == 1) frame(&reader, FrameKind::credit, kind, kChunkBytes, 0, 0);
    }
    if (first != 0) {
      frame(&reader, FrameKind::taken, first, kChunkBytes, 0, 0);
      frame(&reader, FrameKind::unreadable, first, kChunkBytes, 0, 0);
      frame(&reader, FrameKind::expose, first, 0, ExposedShare{what << 56 | 4096, kChunkBytes}, sizeof(ExposedShare));
      frame(&reader, FrameKind::unreadable_part, first, kChunkBytes * 2, 0, 0);
    }
    for (uint64_t at = what == 0 ? kChunkBytes : 0; at < kCount * 2 && what != 2; at += kChunkBytes) {
      const uint64_t bytes = std::min<uint64_t>(kChunkBytes, kCount * 2 - at);
      frame(&reader, FrameKind::result, first, at, 0, static_cast<uint32_t>(bytes));
    }
    seeds.push_back(reader);
  }
  // With their data, of one number, and cut in its middle.
  for (const uint8_t missing : {0, 3}) {
    Input whole = {kRaw | 1};
    for (const uint64_t operation : {0, 1}) {
      append(&whole, frame_of(FrameKind::result, operation, 0, 4));
      append(&whole, 1.f);
    }
    whole.resize(whole.size() - missing);
    seeds.push_back(whole);
  }
  Input notified = {1};
  frame(&notified, FrameKind::fault, 0, 0, FaultHead{1, 1}, 40);
  frame(&notified, FrameKind::status, 0, 0, Members{1, 2, 1, 0}, 28);
  seeds.push_back(notified);
  return seeds;
}

}  // namespace geartrain

// u8 which side, and whether data is in the input (kRaw). A reducer's: u16 how much is rank 0's, the rest is rank 1's.
// Of a rank that outlives its reducer (kOutlives): u16 how much is the reducer's, the rest is rank 1's.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  // On the loop's thread, which is the only one that may touch peers: it polls their sockets as well.
  std::promise<void> done;
  Reader reader(data, size);
  const auto mode = reader.take<uint8_t>();
  if ((mode & kOutlives) != 0) {
    const auto first = reader.take(reader.take<uint16_t>());
    Outliving rank(first, reader.rest(), (mode & kRaw) != 0);
    return 0;
  }
  quiet_loop().post([&] {
    if (mode % 2 == 0) {
      serve(reader, (mode & kRaw) != 0);
    } else {
      Rank rank(reader.rest(), (mode & kRaw) != 0);
    }
    done.set_value();
  });
  done.get_future().wait();
  return 0;
}
