// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), for proofs of the cluster's secret.
//
// A few hundred bytes per connection: plain code, no dependency. Any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace geartrain {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::span<const std::byte> bytes);

// The parts are hashed one after the other, as if they were one.
Digest hmac_sha256(std::string_view key, std::initializer_list<std::span<const std::byte>> parts);

// Takes the same time wherever the two differ.
bool same_digest(const Digest& one, const Digest& other);

// Unpredictable bytes from the kernel. Throws os.
void random_bytes(std::span<uint8_t> out);
uint64_t random_number();  // of 64 random bits

}  // namespace geartrain
