// Fuzzer of the sideband: arbitrary records of a peer with two regions exposed to it read and write only what
// it may, and nothing else.

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/support/fuzz.h"
#include "transport/sideband/sideband.h"

namespace geartrain {
namespace {

// As in sideband.cc; `a` and `b` stand for the ids of the regions.
struct Note {
  uint32_t word, access;
  uint64_t number, offset, bytes, stamp, data;
  uint8_t region[16], from[16];
};
static_assert(sizeof(Note) == 80);

Input notes(const std::vector<Note>& all, size_t payload = 0) {
  Input input;
  for (const Note& note : all) append(&input, note);
  input.resize(input.size() + payload, 3);
  return input;
}

Note note(uint32_t word, uint64_t number, uint64_t offset, uint64_t bytes, char region) {
  Note made{word, 0, number, offset, bytes, 0, 0, {}, {}};
  std::memset(made.region, region, sizeof made.region);
  return made;
}

}  // namespace

std::vector<Input> fuzz_seeds() {
  Note greeting = note(1, 0, 0, 0, 7);
  greeting.data = 4096;
  return {notes({greeting, note(2, 0, 0, 0, 0), note(3, 0, 0, 0, 0)}),
          notes({note(4, 1, 10, 500, 'a'), note(4, 2, 0, 4000, 'b')}),
          notes({note(6, 1, 100, 64, 'b'), note(7, 1, 0, 64, 0)}, 64),
          notes({note(8, 1, 0, 64, 'b'), note(9, 1, 0, 0, 0)}),
          notes({note(5, 1, 0, 64, 0), note(10, 1, 0, 0, 0)}, 64)};
}

}  // namespace geartrain

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace geartrain;
  static std::vector<std::byte> readable(2000), writable(3000);
  const std::vector<std::byte> before = readable;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return 0;
  Descriptor theirs(ends[1]);
  Sideband::Setup setup;
  setup.socket = Descriptor(ends[0]);
  setup.peer = ::getpid();
  setup.peer_timeout_s = 2;
  setup.regions = std::make_shared<ExposedRegions>();
  const auto a = setup.regions->add(readable, false), b = setup.regions->add(writable, true);
  const auto sideband = std::make_shared<Sideband>(std::move(setup));
  Input input(data, data + size);
  for (size_t at = 0; at + sizeof(Note) <= input.size(); at += 16) {
    for (const auto& [letter, region] : {std::pair{'a', a}, {'b', b}}) {
      uint8_t wanted[16];
      std::memset(wanted, letter, sizeof wanted);
      if (std::memcmp(input.data() + at, wanted, sizeof wanted) == 0)
        std::memcpy(input.data() + at, region->id().data(), sizeof wanted);
    }
  }
  [[maybe_unused]] const ssize_t sent = ::send(ends[1], input.data(), input.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  for (int i = 0; i < 40; ++i) {
    sideband->on_ready();
    while (sideband->has_work()) sideband->work();
    if (i % 16 == 0) sideband->tick();
    std::byte answers[65536];
    if (::recv(ends[1], answers, sizeof answers, MSG_DONTWAIT) <= 0 && i > 2) break;
  }
  theirs.reset();
  sideband->on_ready();
  a->close();
  b->close();
  if (readable != before) std::abort();  // it was for reading only
  return 0;
}
