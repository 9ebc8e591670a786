#include "base/sha256.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace geartrain {
namespace {

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Hash {
 public:
  void add(std::span<const std::byte> bytes) {
    total_ += bytes.size();
    while (!bytes.empty()) {
      const size_t take = std::min(bytes.size(), sizeof block_ - filled_);
      std::memcpy(block_ + filled_, bytes.data(), take);
      filled_ += take;
      bytes = bytes.subspan(take);
      if (filled_ == sizeof block_) compress();
    }
  }

  Digest finish() {
    const uint64_t bits = total_ * 8;
    const std::byte one{0x80}, zero{0};
    add({&one, 1});
    while (filled_ != 56) add({&zero, 1});
    std::byte length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(bits >> (56 - 8 * i));
    add(length);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
  }

 private:
  void compress() {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = uint32_t{block_[4 * i]} << 24 | uint32_t{block_[4 * i + 1]} << 16 | uint32_t{block_[4 * i + 2]} << 8 |
             uint32_t{block_[4 * i + 3]};
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
    uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    const uint32_t changed[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state_[i] += changed[i];
    filled_ = 0;
  }

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  size_t filled_ = 0;
  uint64_t total_ = 0;
};

}  // namespace

Digest sha256(std::span<const std::byte> bytes) {
  Hash hash;
  hash.add(bytes);
  return hash.finish();
}

Digest hmac_sha256(std::string_view key, std::initializer_list<std::span<const std::byte>> parts) {
  uint8_t block[64] = {};
  if (key.size() > sizeof block) {
    const Digest short_key = sha256(std::as_bytes(std::span(key)));
    std::copy(short_key.begin(), short_key.end(), block);
  } else {
    std::copy(key.begin(), key.end(), block);
  }
  uint8_t inner_key[64], outer_key[64];
  for (size_t i = 0; i < sizeof block; ++i) {
    inner_key[i] = block[i] ^ 0x36;
    outer_key[i] = block[i] ^ 0x5c;
  }
  Hash inner;
  inner.add(std::as_bytes(std::span(inner_key)));
  for (const auto& part : parts) inner.add(part);
  const Digest inner_digest = inner.finish();
  Hash outer;
  outer.add(std::as_bytes(std::span(outer_key)));
  outer.add(std::as_bytes(std::span(inner_digest)));
  return outer.finish();
}

bool same_digest(const Digest& one, const Digest& other) {
  uint8_t differences = 0;
  for (size_t i = 0; i < one.size(); ++i) differences |= one[i] ^ other[i];
  return differences == 0;
}

void random_bytes(std::span<uint8_t> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail(ErrorKind::os, "the kernel returns no random bytes: ", std::strerror(errno));
    out = out.subspan(static_cast<size_t>(got));
  }
}

uint64_t random_number() {
  uint8_t bytes[sizeof(uint64_t)];
  random_bytes(bytes);
  uint64_t number;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

}  // namespace geartrain
