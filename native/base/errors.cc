#include "base/errors.h"

#include <cstdio>

namespace geartrain {

void MessagePart::append_to(std::string& message) const {
  switch (kind_) {
    case Kind::text:
      message += text_;
      return;
    case Kind::character:
      message += character_;
      return;
    case Kind::real: {
      char digits[32];
      std::snprintf(digits, sizeof(digits), "%g", real_);
      message += digits;
      return;
    }
    case Kind::whole:
      message += std::to_string(whole_);
      return;
    case Kind::natural:
      message += std::to_string(natural_);
      return;
  }
}

std::string message_of(std::initializer_list<MessagePart> parts) {
  std::string message;
  for (const MessagePart& part : parts) part.append_to(message);
  return message;
}

void fail_with(ErrorKind kind, std::initializer_list<MessagePart> parts) {
  throw Error(kind, message_of(parts));
}

}  // namespace geartrain
