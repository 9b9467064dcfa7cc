#include "posix/counters.h"

#include <algorithm>
#include <cstring>
#include <ctime>

namespace ucm::posix {
namespace {

constexpr const char* kNames[] = {
#define X(e, n) n,
    UCM_POSIX_COUNTERS(X)
#undef X
};

}  // namespace

std::map<std::string, std::uint64_t> Counters::snapshot() const {
  std::map<std::string, std::uint64_t> out;
  for (std::size_t i = 0; i < values_.size(); ++i) {
    out.emplace(kNames[i], values_[i].load(std::memory_order_relaxed));
  }
  return out;
}

std::string errno_text(int error) {
  const char* name = strerrorname_np(error);
  return std::string(name ? name : "errno " + std::to_string(error)) + " (" +
         strerrordesc_np(error) + ")";
}

void ErrorRing::add(std::string_view operation, std::string_view path, int error,
                    std::string_view remark) noexcept {
  try {
    const auto now = std::chrono::system_clock::now();
    std::scoped_lock lock(mutex_);
    const auto same = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) {
      return e.error == error && e.operation == operation && e.path == path;
    });
    Entry entry;
    if (same != entries_.end()) {
      entry = std::move(*same);
      entries_.erase(same);
    } else {
      entry = Entry{std::string(operation), std::string(path), error, std::string(remark), 0, now};
    }
    ++entry.count;
    entry.last = now;
    if (entries_.size() >= kCapacity) entries_.erase(entries_.begin());
    entries_.push_back(std::move(entry));
  } catch (...) {
    // Out of memory while describing an error: the counters still tell.
  }
}

std::string ErrorRing::line(const Entry& entry) {
  const std::time_t when = std::chrono::system_clock::to_time_t(entry.last);
  std::tm tm{};
  gmtime_r(&when, &tm);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &tm);
  std::string out = std::string(stamp) + " " + entry.operation + " " + entry.path + ": ";
  if (entry.error != 0) out += errno_text(entry.error);
  if (!entry.remark.empty()) out += (entry.error != 0 ? "; " : "") + entry.remark;
  if (entry.count > 1) out += " [" + std::to_string(entry.count) + " times]";
  return out;
}

std::vector<std::string> ErrorRing::lines() const {
  std::scoped_lock lock(mutex_);
  std::vector<std::string> out;
  for (const auto& entry : entries_) out.push_back(line(entry));
  return out;
}

std::string ErrorRing::latest() const {
  std::scoped_lock lock(mutex_);
  return entries_.empty() ? std::string() : line(entries_.back());
}

}  // namespace ucm::posix
