// Fewer page faults for fresh memory.

#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace bittrain {

// Smaller buffers have few faults, and are seldom fresh.
constexpr size_t kLargeBuffer = size_t{4} << 20;

// Ask for huge pages under a buffer that has not been written to. Memory that malloc has just
// got from the kernel is mapped as it is first touched: 4 KB, or 2 MB, at a time.
inline void UseHugePages(void* buffer, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (buffer == nullptr || bytes < kLargeBuffer) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(buffer) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(buffer) + bytes) / page * page;
  // Advice: where the kernel has no huge pages, nothing is lost.
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)buffer;
  (void)bytes;
#endif
}

}  // namespace bittrain
