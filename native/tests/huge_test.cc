// Huge pages of shared memory: asked for where the kernel gives them, harmless where it does not.
#include "memory/huge.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace ucm::testing {
namespace {

using memory::kHugePage;

/// A file in /dev/shm without a name, and its mapping; both end with it.
class SharedFile {
 public:
  explicit SharedFile(std::uint64_t file_bytes) : fd(open_file()) {
    EXPECT_GE(fd, 0) << std::strerror(errno);
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(file_bytes)), 0);
  }
  ~SharedFile() {
    if (data != MAP_FAILED) ::munmap(data, mapped);
    ::close(fd);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  std::byte* map(std::uint64_t offset, std::uint64_t bytes) {
    mapped = bytes;
    data = memory::map_shared_aligned(fd, static_cast<off_t>(offset), bytes);
    EXPECT_NE(data, MAP_FAILED) << std::strerror(errno);
    return static_cast<std::byte*>(data);
  }
  [[nodiscard]] std::uint64_t allocated() const {
    struct stat st {};
    EXPECT_EQ(::fstat(fd, &st), 0);
    return static_cast<std::uint64_t>(st.st_blocks) * 512;
  }

  int fd;
  void* data = MAP_FAILED;
  std::uint64_t mapped = 0;

 private:
  static int open_file() {
    std::string name = "/dev/shm/ucm-huge-test-XXXXXX";
    const int made = ::mkstemp(name.data());
    ::unlink(name.c_str());
    return made;
  }
};

/// Bytes of the mapping at `data` that the kernel has mapped with huge pages.
std::uint64_t huge_bytes(const void* data) {
  std::ifstream maps("/proc/self/smaps");
  char start[32];
  std::snprintf(start, sizeof start, "%lx-", reinterpret_cast<unsigned long>(data));
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("-") < line.find(" ") && line.find(":") > line.find(" ")) {
      here = line.rfind(start, 0) == 0;
    } else if (here && line.rfind("ShmemPmdMapped:", 0) == 0) {
      return std::stoull(line.substr(15)) * 1024;
    }
  }
  return 0;
}

/// Why this kernel gives no huge page here; empty when it does.
std::string refusal() {
  SharedFile file(kHugePage);
  // Not by the function under test: its mistakes must not look like a kernel that refuses.
  void* const room = ::mmap(nullptr, 2 * kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto at = (reinterpret_cast<std::uintptr_t>(room) + kHugePage - 1) / kHugePage * kHugePage;
  auto* const data =
      static_cast<std::byte*>(::mmap(reinterpret_cast<void*>(at), kHugePage, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_FIXED, file.fd, 0));
  *data = std::byte{1};
  int error = ::madvise(data, kHugePage, MADV_COLLAPSE) == 0 ? 0 : errno;
  if (error == EAGAIN) error = ::madvise(data, kHugePage, MADV_COLLAPSE) == 0 ? 0 : errno;
  ::munmap(room, 2 * kHugePage);
  if (error == 0) return {};
  return std::string("the kernel collapses no shared memory (MADV_COLLAPSE: ") +
         std::strerror(error) + ")";
}

TEST(HugePages, MappingsStartAtAHugePageAndLeaveNothingElseMapped) {
  // Sizes on both sides of page and huge page borders, at the start and behind other data.
  for (const std::uint64_t bytes :
       {std::uint64_t{1}, std::uint64_t{4096}, kHugePage - 1, kHugePage, 3 * kHugePage + 5000}) {
    for (const std::uint64_t offset : {std::uint64_t{0}, 2 * kHugePage}) {
      SharedFile file(offset + bytes);
      const char mark = 'm';
      ASSERT_EQ(::pwrite(file.fd, &mark, 1, static_cast<off_t>(offset + bytes - 1)), 1);
      std::byte* const data = file.map(offset, bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % kHugePage, 0u);
      EXPECT_EQ(data[bytes - 1], std::byte{'m'});
      // Both ends of the reservation were given back: a page there is not mapped.
      const std::uint64_t pages = (bytes + 4095) / 4096 * 4096;
      unsigned char seen = 0;
      EXPECT_EQ(::mincore(data + pages, 4096, &seen), -1) << bytes << " bytes at " << offset;
      EXPECT_EQ(::mincore(data - 4096, 4096, &seen), -1) << bytes << " bytes at " << offset;
    }
  }
}

TEST(HugePages, AFileThatCannotBeMappedIsAnErrorAndKeepsNothingReserved) {
  errno = 0;
  EXPECT_EQ(memory::map_shared_aligned(-1, 0, kHugePage), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
}

TEST(HugePages, AreGrantedAndMappedAndKeepWhatWasThere) {
  if (const std::string why = refusal(); !why.empty()) GTEST_SKIP() << why;
  constexpr std::uint64_t kWhole = 8;  // huge pages, and a rest that is none
  const std::uint64_t bytes = kWhole * kHugePage + 12'288;
  for (const unsigned threads : {0U, 1U, 3U}) {
    SharedFile file(kHugePage + bytes);
    std::byte* const data = file.map(kHugePage, bytes);
    std::memset(data + kHugePage, 0x5a, 8192);
    const std::uint64_t granted =
        memory::back_with_huge_pages(file.fd, kHugePage, data, bytes, threads);
    // The kernel may be short of free huge pages, which is no error: then fewer are granted.
    ASSERT_GT(granted, 0u);
    EXPECT_EQ(granted % kHugePage, 0u);
    EXPECT_LE(granted, kWhole * kHugePage);
    EXPECT_GE(file.allocated(), granted);
    EXPECT_EQ(huge_bytes(data), granted);
    EXPECT_EQ(data[0], std::byte{0});
    EXPECT_EQ(data[kHugePage + 8191], std::byte{0x5a});
    EXPECT_EQ(data[kHugePage + 8192], std::byte{0});
  }
}

TEST(HugePages, NothingIsAskedForBelowOneHugePage) {
  SharedFile file(kHugePage);
  std::byte* const data = file.map(0, kHugePage - 4096);
  EXPECT_EQ(memory::back_with_huge_pages(file.fd, 0, data, kHugePage - 4096, 2), 0u);
  EXPECT_EQ(file.allocated(), 0u);
}

TEST(HugePages, WhatCannotBeAllocatedIsLeftAsItWas) {
  // A file opened for reading refuses the allocation as a full file system does: no fault, no signal.
  SharedFile file(2 * kHugePage);
  std::byte* const data = file.map(0, 2 * kHugePage);
  const std::string again = "/proc/self/fd/" + std::to_string(file.fd);
  const int read_only = ::open(again.c_str(), O_RDONLY);
  ASSERT_GE(read_only, 0);
  EXPECT_EQ(memory::back_with_huge_pages(read_only, 0, data, 2 * kHugePage, 2), 0u);
  EXPECT_EQ(file.allocated(), 0u);
  ::close(read_only);
}

}  // namespace
}  // namespace ucm::testing
