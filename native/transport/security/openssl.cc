#include "transport/security/openssl.h"

#include <dlfcn.h>

#include "base/errors.h"

namespace geartrain {
namespace {

struct Loaded {
  OpenSsl functions;
  std::string why_not;

  Loaded() {
    const std::string file = "libssl.so.3";
    void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // for as long as the process lives
    if (library == nullptr) {
      const char* reason = ::dlerror();
      why_not = "TLS needs OpenSSL 3, and " + file + " is not on this machine";
      if (reason != nullptr) why_not += std::string(" (") + reason + ")";
      return;
    }
    // libcrypto's are found as well: it is what libssl was linked with.
#define GEARTRAIN_OPENSSL_FIND(name, result, arguments)                                 \
  functions.name = reinterpret_cast<decltype(functions.name)>(::dlsym(library, #name)); \
  if (functions.name == nullptr && why_not.empty()) why_not = file + " is not OpenSSL 3: it has no " #name;
    GEARTRAIN_OPENSSL(GEARTRAIN_OPENSSL_FIND)
#undef GEARTRAIN_OPENSSL_FIND
    // Threads of this library live as long as the process: OpenSSL must not clean up under them.
    if (why_not.empty() && functions.OPENSSL_init_ssl(OpenSsl::kNoAtExit, nullptr) != 1) {
      why_not = file + " could not be initialised";
    }
  }
};

const Loaded& loaded() {
  static const auto* once = new Loaded();
  return *once;
}

}  // namespace

const OpenSsl& openssl() {
  if (!loaded().why_not.empty()) fail(ErrorKind::not_viable, loaded().why_not);
  return loaded().functions;
}

std::string tls_not_viable() {
  return loaded().why_not;
}

}  // namespace geartrain
