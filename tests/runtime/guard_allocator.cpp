// An allocator of CPU memory whose every allocation ends at a page that faults and begins behind another one.
// What lies between an allocation and those pages holds a pattern, which is checked when the memory is freed.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLine = 64; // tensors on the CPU begin at a cache line, so that up to 63 bytes lie behind their end
constexpr unsigned char kPattern = 0xA5;

std::atomic<int64_t> allocated{0}, damaged{0};

struct Block {
  unsigned char *start, *data;
  size_t usable, nbytes;
};

bool holds_pattern(const unsigned char* from, const unsigned char* to) {
  for (; from < to; ++from) {
    if (*from != kPattern) return false;
  }
  return true;
}

std::mutex mutex;
std::unordered_map<void*, Block>& blocks() {
  static auto* all = new std::unordered_map<void*, Block>();
  return *all;
}

void release(void* data) {
  if (data == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto block = blocks().at(data);
  blocks().erase(data);
  auto* end = block.data + block.nbytes;
  auto* usable = block.start + kPage;
  if (!holds_pattern(usable, block.data) || !holds_pattern(end, usable + block.usable)) ++damaged;
  munmap(block.start, block.usable + 2 * kPage);
}

struct GuardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    auto lines = (nbytes + kLine - 1) / kLine * kLine;
    auto usable = (lines + kPage - 1) / kPage * kPage;
    auto* map = mmap(nullptr, usable + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(map != MAP_FAILED, "no address space left");
    auto* start = static_cast<unsigned char*>(map);
    TORCH_CHECK(mprotect(start + kPage, usable, PROT_READ | PROT_WRITE) == 0, "no memory left");
    std::memset(start + kPage, kPattern, usable);
    auto* data = start + kPage + usable - lines;
    ++allocated;
    std::lock_guard<std::mutex> lock(mutex);
    blocks()[data] = Block{start, data, usable, nbytes};
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

} // namespace

extern "C" void guard_install() {
  static GuardAllocator guard;
  c10::SetCPUAllocator(&guard, /*priority=*/100);
}

extern "C" int64_t guard_allocated() { return allocated; }
extern "C" int64_t guard_damaged() { return damaged; }
