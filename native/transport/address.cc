#include "transport/address.h"

#include <algorithm>

#include "base/errors.h"

namespace geartrain {

namespace {

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(by, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

}  // namespace

std::string Address::text() const {
  std::string out = "id=" + id;
  if (!shm.empty()) out += ";shm=" + shm;
  for (const std::string& place : tcp) out += ";tcp=" + place;
  return out;
}

Address Address::parse(const std::string& text) {
  Address address;
  if (text.size() > 4096) fail(ErrorKind::argument, "an address has 4096 characters at most, found ", text.size());
  for (const std::string& part : split(text, ';')) {
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals), value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (value.empty()) fail(ErrorKind::argument, "not an address of a listener: '", text, "'");
    if (key == "id") address.id = value;
    if (key == "shm") address.shm = value;
    if (key == "tcp") address.tcp.push_back(value);
  }
  if (address.id.size() != 32 && address.id != Address::kAnyId) {
    fail(ErrorKind::argument, "not an address of a listener: '", text, "'");
  }
  return address;
}

}  // namespace geartrain
