#include "posix/names.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace ucm::posix {
namespace {

constexpr char kHex[] = "0123456789abcdef";

int nibble(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

ObjectPath::ObjectPath(const BlockId& id) noexcept {
  char* out = text + kDir + 1;
  for (std::uint8_t b : id.bytes) {
    *out++ = kHex[b >> 4];
    *out++ = kHex[b & 15];
  }
  *out = 0;
  text[0] = text[kDir + 1];
  text[1] = text[kDir + 2];
  text[kDir] = '/';
}

FanoutName::FanoutName(unsigned index) noexcept
    : text{kHex[(index >> 4) & 15], kHex[index & 15], 0} {}

bool parse_object_name(std::string_view name, BlockId& id) noexcept {
  if (name.size() != 32) return false;
  for (std::size_t i = 0; i < 16; ++i) {
    const int hi = nibble(name[2 * i]);
    const int lo = nibble(name[2 * i + 1]);
    if (hi < 0 || lo < 0) return false;
    id.bytes[i] = static_cast<std::uint8_t>(hi << 4 | lo);
  }
  return true;
}

std::uint64_t process_start_ticks(std::int64_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(in, line)) return 0;
  // The command name may hold spaces and parentheses: fields are counted from the last ')'.
  const auto close = line.rfind(')');
  if (close == std::string::npos) return 0;
  std::istringstream rest(line.substr(close + 1));
  std::string field;
  for (int i = 3; i < 22; ++i) rest >> field;
  std::uint64_t ticks = 0;
  rest >> ticks;
  return ticks;
}

Identity Identity::of_this_process() {
  Identity me;
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  if (!std::getline(in, me.boot) || me.boot.size() < 8) me.boot = "unknown-";
  struct stat st {};
  me.pid_space = stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
  me.pid = getpid();
  me.start_ticks = process_start_ticks(me.pid);
  std::uint32_t nonce = 0;
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) {
    // Without randomness the address of a local still differs between stages of one process.
    nonce = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(&me) >> 4);
  }
  char tail[48];
  std::snprintf(tail, sizeof tail, "-%lld-%08x", static_cast<long long>(me.pid), nonce);
  me.label = me.boot.substr(0, 8) + tail;
  return me;
}

void TempNames::next(const ObjectPath& object, char* out, std::size_t size) noexcept {
  std::snprintf(out, size, "%.2s/%s%s-%llu", object.text, kTempPrefix.data(), label_.c_str(),
                static_cast<unsigned long long>(counter_.fetch_add(1, std::memory_order_relaxed)));
}

}  // namespace ucm::posix
