// Addresses of listeners, as text that is passed to peers.
#pragma once

#include <string>
#include <vector>

namespace geartrain {

// Where a listener can be reached: "id=<32 hex>;shm=<name>;tcp=<host>:<port>". Parsed from untrusted text.
// With "id=any" the listener's identity is not checked: for a place that is known before its listener is, such as a
// fixed port.
struct Address {
  static constexpr const char* kAnyId = "any";
  std::string id;
  std::string shm;               // name of a Unix socket in the abstract namespace; empty: none
  std::vector<std::string> tcp;  // host:port, in the order to try them

  std::string text() const;
  static Address parse(const std::string& text);  // throws argument
};

}  // namespace geartrain
