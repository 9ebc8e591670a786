// Errors of the native layer: one exception type with a kind for each named Python error.
// Any thread may throw; nothing here allocates beyond the message.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace geartrain {

// Each kind is one class of geartrain.errors; python/errors.cc holds the table.
enum class ErrorKind {
  schema,
  exists,
  missing,
  stale_store,
  incompatible,
  closed,
  full,
  empty,
  not_enough,
  turnover,
  stale_key,
  no_space,
  lock_timeout,
  corrupt,
  untrusted_store,
  os,
  // between processes
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

// Nobody listens at an address: its host has said so. Else a peer that cannot be reached may well be alive.
class NobodyListens final : public Error {
 public:
  explicit NobodyListens(const std::string& message) : Error(ErrorKind::not_viable, message) {}
};

// Throws Error(kind) with the parts written one after the other: fail(k, "asked for ", n, " rows").
template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(kind, message.str());
}

}  // namespace geartrain
