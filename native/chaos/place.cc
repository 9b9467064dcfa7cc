#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <system_error>

#include "campaign.h"

namespace ucm::chaos {

Board& make_board() {
  void* const p =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return *static_cast<Board*>(p);  // zeros are a board on which nothing happened
}

Place::Place(const std::string& base) : path_(base + "/ucm-chaos-XXXXXX") {
  if (::mkdtemp(path_.data()) == nullptr) {
    throw std::system_error(errno, std::generic_category(), "mkdtemp " + path_);
  }
}

Place::~Place() {
  if (mounted_) (void)::umount2(path_.c_str(), MNT_DETACH);
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

bool Place::mount_small(std::uint64_t kib, std::uint64_t inodes) {
  // Nobody outside this process and its children sees the mount.
  static const bool own = ::unshare(CLONE_NEWNS) == 0 &&
                          ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  if (!own) return false;
  const std::string options =
      "size=" + std::to_string(kib) + "k,nr_inodes=" + std::to_string(inodes);
  mounted_ = ::mount("chaos", path_.c_str(), "tmpfs", 0, options.c_str()) == 0;
  return mounted_;
}

}  // namespace ucm::chaos
