// Minimal test framework: TEST(promise) { CHECK(...); } and one RUN_TESTS() per file.
//
// Tests run one after the other in the order they are written; an argument runs only those whose name contains it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/deadline.h"
#include "base/errors.h"

// ThreadSanitizer neither follows a fork out of a process with threads nor sees two mappings of one file as one memory.
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

namespace testing {

// The factor by which deadlines are extended on slow machines and under sanitizers, so that slowness is no
// failure. GEARTRAIN_TEST_PATIENCE=4 allows four times as long.
inline double patience() {
  static const double factor = [] {
    const char* given = std::getenv("GEARTRAIN_TEST_PATIENCE");
    const double asked = given == nullptr ? 1.0 : std::strtod(given, nullptr);
    return (asked > 0 ? asked : 1.0) * (kThreadSanitizer ? 6.0 : kAddressSanitizer ? 3.0 : 1.0);
  }();
  return factor;
}

// Whether less than so many seconds have passed since then, with that factor.
inline bool within(uint64_t began_ns, double seconds) {
  return static_cast<double>(geartrain::monotonic_ns() - began_ns) < seconds * patience() * 1e9;
}

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline std::atomic<int> failures{0};

struct Registration {
  Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

template <typename... Parts>
void failed(const char* file, int line, const Parts&... parts) {
  ++failures;
  std::ostringstream text;
  (text << file << ':' << line << ": " << ... << parts);
  std::cerr << text.str() << std::endl;
}

// A store name that no other process uses, for this process and call.
inline std::string unique_name() {
  static std::atomic<int> number{0};
  return "native-test-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

inline int run_all(int argc, char** argv) {
  int ran = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const int before = failures;
    try {
      test.body();
    } catch (const std::exception& error) {
      failed(test.name, 0, "threw ", error.what());
    }
    std::printf("%s %s\n", failures == before ? "ok  " : "FAIL", test.name);
    std::fflush(stdout);
    ++ran;
  }
  return failures != 0 || ran == 0;
}

}  // namespace testing

namespace geartrain {

// A deadline that a test does not expect to pass.
inline Deadline soon(double seconds = 20) {
  return Deadline::after(seconds * testing::patience());
}

}  // namespace geartrain

#define TEST(name)                                                  \
  static void name();                                               \
  static const testing::Registration register_##name(#name, &name); \
  static void name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) testing::failed(__FILE__, __LINE__, "not true: ", #condition); \
  } while (false)

#define CHECK_EQ(found, expected)                                                                      \
  do {                                                                                                 \
    const auto found_value = (found);                                                                  \
    const auto expected_value = (expected);                                                            \
    if (!(found_value == expected_value)) {                                                            \
      testing::failed(__FILE__, __LINE__, #found, " is ", found_value, ", expected ", expected_value); \
    }                                                                                                  \
  } while (false)

#define CHECK_THROWS(expected_kind, statement)                                                       \
  do {                                                                                               \
    bool thrown = false;                                                                             \
    try {                                                                                            \
      statement;                                                                                     \
    } catch (const geartrain::Error& error) {                                                        \
      thrown = error.kind == geartrain::ErrorKind::expected_kind;                                    \
      if (!thrown) testing::failed(__FILE__, __LINE__, "threw another kind: ", error.what());        \
    }                                                                                                \
    if (!thrown) testing::failed(__FILE__, __LINE__, #statement, " did not throw ", #expected_kind); \
  } while (false)

#define RUN_TESTS()                      \
  int main(int argc, char** argv) {      \
    return testing::run_all(argc, argv); \
  }
