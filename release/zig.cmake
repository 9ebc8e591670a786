# CMake toolchain of the wheels: zig's clang and libc++, against the symbols of glibc 2.28. release/compiled.py sets the
# variables.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "$ENV{GEARTRAIN_WHEEL_ARCH}")
set(CMAKE_CXX_COMPILER "$ENV{GEARTRAIN_WHEEL_CXX}")
# nanobind's headers name stderr, and with libc++ and the stable ABI nothing before them brings it in.
set(CMAKE_CXX_FLAGS_INIT "-g0 -include stdio.h")
# By the linker: this machine's strip knows its own processor only.
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s")
set(CMAKE_STRIP "")
# Python's headers are the same on both processors; the interpreter is this machine's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Before zig's own, which is then left out (unwinder() in release/compiled.py).
set(CMAKE_CXX_STANDARD_LIBRARIES_INIT "$ENV{GEARTRAIN_WHEEL_UNWINDER}")
