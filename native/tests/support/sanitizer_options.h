// AddressSanitizer's settings for programs that run inputs by the million: what was freed waits in 16 MB and not in
// 256, which no processor's cache holds, and stacks of allocations are short.
#pragma once

extern "C" const char* __asan_default_options() {
  return "quarantine_size_mb=16:malloc_context_size=8:handle_abort=1:allocator_may_return_null=0";
}
