// The rule of the guard: the last `window` samples, `failures` bad ones open, a clean window closes.
#pragma once

#include <bit>
#include <cstdint>

namespace ucm::guard {

class Breaker {
 public:
  static constexpr std::uint32_t kMaxWindow = 64;

  /// 1 <= failures <= window <= kMaxWindow.
  Breaker(std::uint32_t window, std::uint32_t failures) noexcept
      : window_(window), failures_(failures) {}

  /// Returns true when this sample opened or closed it.
  bool add(bool good) noexcept {
    const std::uint64_t mask = window_ == kMaxWindow ? ~std::uint64_t{0} : (1ULL << window_) - 1;
    bad_ = ((bad_ << 1) | (good ? 0U : 1U)) & mask;
    if (samples_ < window_) ++samples_;
    if (!open_ && bad() >= failures_) return open_ = true;
    if (open_ && samples_ == window_ && bad() == 0) {
      open_ = false;
      return true;
    }
    return false;
  }
  [[nodiscard]] bool open() const noexcept { return open_; }
  /// Bad samples in the window.
  [[nodiscard]] std::uint32_t bad() const noexcept {
    return static_cast<std::uint32_t>(std::popcount(bad_));
  }
  [[nodiscard]] std::uint32_t samples() const noexcept { return samples_; }
  /// Good samples since the last bad one, at most a window.
  [[nodiscard]] std::uint32_t good_streak() const noexcept {
    const auto streak = static_cast<std::uint32_t>(std::countr_zero(bad_));
    return streak < samples_ ? streak : samples_;
  }

 private:
  const std::uint32_t window_;
  const std::uint32_t failures_;
  std::uint64_t bad_ = 0;  // bit 0: the latest sample
  std::uint32_t samples_ = 0;
  bool open_ = false;
};

}  // namespace ucm::guard
