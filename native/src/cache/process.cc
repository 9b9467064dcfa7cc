#include "cache/process.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace ucm::cache {
namespace {

std::string slurp(const char* path) noexcept {
  std::string text(1024, '\0');
  std::FILE* f = std::fopen(path, "re");
  if (f == nullptr) return {};
  text.resize(std::fread(text.data(), 1, text.size(), f));
  std::fclose(f);
  return text;
}

int hex(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::uint64_t own_start_time() noexcept {
  const std::string stat = slurp("/proc/self/stat");
  // The command name (field 2) may hold spaces and brackets: count from its end.
  const char* at = std::strrchr(stat.c_str(), ')');
  if (at == nullptr) return 0;
  for (int field = 2; field < 22; ++field) {
    at = std::strchr(at + 1, ' ');
    if (at == nullptr) return 0;
  }
  return std::strtoull(at + 1, nullptr, 10);
}

std::array<std::uint8_t, 16> boot_id() noexcept {
  std::array<std::uint8_t, 16> id{};
  std::size_t nibble = 0;
  for (const char c : slurp("/proc/sys/kernel/random/boot_id")) {
    const int v = hex(c);
    if (v < 0) continue;
    if (nibble == 32) break;
    id[nibble / 2] = static_cast<std::uint8_t>(id[nibble / 2] << 4 | v);
    ++nibble;
  }
  return id;
}

}  // namespace ucm::cache
