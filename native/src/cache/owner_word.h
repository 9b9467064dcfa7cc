// A lock in shared memory that knows its owner: a process that dies with it does not keep others out.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "cache/futex.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ucm::cache::owner_word {

inline constexpr std::uint32_t kWaiters = 0x8000'0000U;
inline constexpr int kSpins = 200;
inline constexpr auto kSlice = std::chrono::milliseconds(10);  // then: does the owner still live?
inline constexpr auto kPatience = std::chrono::seconds(2);

using Word = std::atomic<std::uint32_t>;

[[nodiscard]] inline bool try_lock(Word& word, std::uint32_t self) noexcept {
  std::uint32_t expected = 0;
  return word.compare_exchange_strong(expected, self + 1, std::memory_order_acquire,
                                      std::memory_order_relaxed);
}

/// `if_dead(owner)` frees the locks of that process if it is dead. False: a living process kept the
/// lock for longer than kPatience. Threads of one process exclude each other too.
template <class IfDead>
[[nodiscard]] bool lock(Word& word, std::uint32_t self, IfDead&& if_dead) noexcept {
  if (try_lock(word, self)) return true;
  for (int i = 0; i < kSpins; ++i) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (word.load(std::memory_order_relaxed) == 0 && try_lock(word, self)) return true;
  }
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    std::uint32_t seen = word.load(std::memory_order_relaxed);
    if (seen == 0) {
      // With the waiters bit: others may sleep behind us, so our unlock wakes.
      if (word.compare_exchange_weak(seen, (self + 1) | kWaiters, std::memory_order_acquire,
                                     std::memory_order_relaxed)) {
        return true;
      }
      continue;
    }
    if ((seen & kWaiters) == 0 &&
        !word.compare_exchange_weak(seen, seen | kWaiters, std::memory_order_relaxed)) {
      continue;
    }
    const auto before = std::chrono::steady_clock::now();
    futex_wait(word, seen | kWaiters, kSlice);
    const auto now = std::chrono::steady_clock::now();
    if (now - before < kSlice) continue;
    if_dead((seen & ~kWaiters) - 1);
    if (now >= give_up) return false;
  }
}

inline void unlock(Word& word) noexcept {
  if ((word.exchange(0, std::memory_order_release) & kWaiters) != 0) futex_wake_one(word);
}

/// Free the lock if `dead` holds it.
inline void break_lock(Word& word, std::uint32_t dead) noexcept {
  std::uint32_t seen = word.load(std::memory_order_relaxed);
  while ((seen & ~kWaiters) == dead + 1) {
    if (word.compare_exchange_weak(seen, 0, std::memory_order_acq_rel)) {
      futex_wake_all(word);
      return;
    }
  }
}

}  // namespace ucm::cache::owner_word
