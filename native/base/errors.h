// Errors of the native layer: one exception type with a kind for each named Python error.
// Any thread may throw; nothing here allocates beyond the message.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace geartrain {

// Each kind is one class of geartrain.errors; python/errors.cc holds the table.
enum class ErrorKind {
  schema,
  exists,
  missing,
  stale_store,
  incompatible,
  closed,
  read_only,
  full,
  empty,
  not_enough,
  turnover,
  stale_key,
  stale_claim,
  no_space,
  lock_timeout,
  corrupt,
  untrusted_store,
  io,
  os,
  // between processes
  argument,
  peer_lost,
  timed_out,
  not_viable,
  untrusted,
  frame,
  hung_up,
  region,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  const ErrorKind kind;
};

// The listener of an address is gone: its host has said so, or something else answers there (frame). Else a peer that
// cannot be reached may well be alive.
class NobodyListens final : public Error {
 public:
  explicit NobodyListens(const std::string& message, ErrorKind kind = ErrorKind::not_viable) : Error(kind, message) {}
};

// Members of a group that cannot be reached, in their order: a rank, or world + index for a reducer.
class MembersUnreached final : public Error {
 public:
  MembersUnreached(ErrorKind kind, const std::string& message, std::vector<uint32_t> numbers)
      : Error(kind, message), members(std::move(numbers)) {}
  const std::vector<uint32_t> members;
};

// One part of a message: text, a number or a character, seen and not copied. Without a stream, whose code would stand
// at every place that can fail.
class MessagePart {
 public:
  MessagePart(std::string_view text) : kind_(Kind::text), text_(text) {}
  MessagePart(const std::string& text) : MessagePart(std::string_view(text)) {}
  MessagePart(const char* text) : MessagePart(std::string_view(text)) {}
  MessagePart(char character) : kind_(Kind::character), character_(character) {}
  MessagePart(std::floating_point auto number) : kind_(Kind::real), real_(static_cast<double>(number)) {}
  MessagePart(std::signed_integral auto number) : kind_(Kind::whole), whole_(number) {}
  MessagePart(std::unsigned_integral auto number) : kind_(Kind::natural), natural_(number) {}
  template <typename T>
  MessagePart(const std::atomic<T>& number) : MessagePart(number.load(std::memory_order_relaxed)) {}

  void append_to(std::string& message) const;

 private:
  enum class Kind { text, character, real, whole, natural };
  Kind kind_;
  union {
    std::string_view text_;
    char character_;
    double real_;
    int64_t whole_;
    uint64_t natural_;
  };
};

// The parts one after the other, numbers as streams write them (6 digits of a double).
std::string message_of(std::initializer_list<MessagePart> parts);
[[noreturn]] void fail_with(ErrorKind kind, std::initializer_list<MessagePart> parts);

// Throws Error(kind) with the parts written one after the other: fail(k, "asked for ", n, " rows").
template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  fail_with(kind, {MessagePart(parts)...});
}

}  // namespace geartrain
