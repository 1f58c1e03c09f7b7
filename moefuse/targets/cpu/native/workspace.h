// Memory for the rows between the GEMMs, kept from call to call.
//
// In: bytes. Out: a block of at least that many, one per running call, reused by later calls; it grows to the largest
// call seen. moefuse_workspace_bytes() tells how much is held.
#pragma once

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moefuse {

class Workspace {
   public:
    explicit Workspace(size_t bytes) : block_(take(bytes)) {}
    ~Workspace() {
        const std::lock_guard<std::mutex> lock(mutex());
        free_blocks().push_back(block_);
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    char* data() const { return block_.data; }
    static size_t held() {
        const std::lock_guard<std::mutex> lock(mutex());
        return total();
    }
    static void release() {
        const std::lock_guard<std::mutex> lock(mutex());
        for (const Block& block : free_blocks()) {
            total() -= block.bytes;
            std::free(block.data);
        }
        free_blocks().clear();
    }

   private:
    struct Block {
        char* data;
        size_t bytes;
    };

    static Block take(size_t bytes) {
        constexpr size_t PAGE = size_t(1) << 21;
        const std::lock_guard<std::mutex> lock(mutex());
        auto& blocks = free_blocks();
        if (!blocks.empty()) {
            Block block = blocks.back();
            blocks.pop_back();
            if (block.bytes >= bytes) return block;
            total() -= block.bytes;
            std::free(block.data);
        }
        Block block{nullptr, (bytes + PAGE - 1) / PAGE * PAGE};
        block.data = static_cast<char*>(std::aligned_alloc(PAGE, block.bytes));
        if (!block.data) throw std::bad_alloc();
#if defined(__linux__)
        madvise(block.data, block.bytes, MADV_HUGEPAGE);  // a hint: without it the block is only slower
#endif
        total() += block.bytes;
        return block;
    }
    static std::mutex& mutex() {
        static std::mutex the;
        return the;
    }
    static std::vector<Block>& free_blocks() {
        static std::vector<Block> the;
        return the;
    }
    static size_t& total() {
        static size_t the = 0;
        return the;
    }

    Block block_;
};

}  // namespace moefuse
