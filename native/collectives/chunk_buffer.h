// Memory of one chunk, counted by those who use it, and taken again when nobody does. One thread: the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "collectives/protocol.h"

namespace geartrain {

class BlockPool;

struct Block {
  alignas(64) std::byte data[kChunkBytes];
  BlockPool* pool;
  uint32_t users;
};

// Keeps at most `kept` free blocks warm; the rest goes back to the system. Outlives its blocks.
class BlockPool {
 public:
  explicit BlockPool(size_t kept = 512) : kept_(kept) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool() {
    for (Block* block : free_) delete block;
  }
  uint64_t in_use() const { return in_use_; }

 private:
  friend class BlockRef;
  Block* take() {
    ++in_use_;
    if (free_.empty()) return new Block;
    Block* const block = free_.back();
    free_.pop_back();
    return block;
  }
  void give(Block* block) {
    --in_use_;
    if (free_.size() < kept_) {
      free_.push_back(block);
    } else {
      delete block;
    }
  }
  const size_t kept_;
  uint64_t in_use_ = 0;
  std::vector<Block*> free_;
};

class BlockRef {
 public:
  BlockRef() = default;
  explicit BlockRef(BlockPool& pool) : block_(pool.take()) {
    block_->pool = &pool;
    block_->users = 1;
  }
  BlockRef(const BlockRef& other) : block_(other.block_) {
    if (block_ != nullptr) ++block_->users;
  }
  BlockRef(BlockRef&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  BlockRef& operator=(BlockRef other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~BlockRef() {
    if (block_ != nullptr && --block_->users == 0) block_->pool->give(block_);
  }
  std::byte* data() const { return block_->data; }
  explicit operator bool() const { return block_ != nullptr; }

 private:
  Block* block_ = nullptr;
};

}  // namespace geartrain
