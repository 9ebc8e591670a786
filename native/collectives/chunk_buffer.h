// Reference-counted buffers of one chunk, reused when the last reference is dropped. One thread: the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "collectives/protocol.h"

namespace geartrain {

class ChunkBufferPool;

struct ChunkBuffer {
  alignas(64) std::byte data[kChunkBytes];
  ChunkBufferPool* pool;
  uint32_t users;
};

// Keeps at most `kept` free blocks warm; the rest is returned to the system. Outlives its blocks. Giving a block back
// needs no memory: it happens in destructors.
class ChunkBufferPool {
 public:
  explicit ChunkBufferPool(size_t kept = 512) : kept_(kept) { free_.reserve(kept); }
  ChunkBufferPool(const ChunkBufferPool&) = delete;
  ChunkBufferPool& operator=(const ChunkBufferPool&) = delete;
  ~ChunkBufferPool() {
    for (ChunkBuffer* block : free_) delete block;
  }
  uint64_t in_use() const { return in_use_; }

 private:
  friend class ChunkBufferRef;
  ChunkBuffer* take() {
    ChunkBuffer* const block = free_.empty() ? new ChunkBuffer : free_.back();
    if (!free_.empty()) free_.pop_back();
    ++in_use_;
    return block;
  }
  void give(ChunkBuffer* block) noexcept {
    --in_use_;
    if (free_.size() < kept_) {
      free_.push_back(block);
    } else {
      delete block;
    }
  }
  const size_t kept_;
  uint64_t in_use_ = 0;
  std::vector<ChunkBuffer*> free_;
};

class ChunkBufferRef {
 public:
  ChunkBufferRef() = default;
  explicit ChunkBufferRef(ChunkBufferPool& pool) : block_(pool.take()) {
    block_->pool = &pool;
    block_->users = 1;
  }
  ChunkBufferRef(const ChunkBufferRef& other) : block_(other.block_) {
    if (block_ != nullptr) ++block_->users;
  }
  ChunkBufferRef(ChunkBufferRef&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  ChunkBufferRef& operator=(ChunkBufferRef other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~ChunkBufferRef() {
    if (block_ != nullptr && --block_->users == 0) block_->pool->give(block_);
  }
  std::byte* data() const { return block_->data; }
  explicit operator bool() const { return block_ != nullptr; }

 private:
  ChunkBuffer* block_ = nullptr;
};

// Chunks in their order. Allocates nothing while it is empty, which most are: every share has one for each rank.
class ChunkQueue {
 public:
  bool empty() const { return first_ == chunks_.size(); }
  ChunkBufferRef& front() { return chunks_[first_]; }
  ChunkBufferRef& back() { return chunks_.back(); }
  ChunkBufferRef& operator[](size_t i) { return chunks_[first_ + i]; }
  void push_back(ChunkBufferRef chunk) { chunks_.push_back(std::move(chunk)); }
  void pop_front() {
    chunks_[first_++] = {};
    if (first_ < chunks_.size() && first_ < kMostGone) return;
    chunks_.erase(chunks_.begin(), chunks_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }

 private:
  static constexpr size_t kMostGone = 64;
  std::vector<ChunkBufferRef> chunks_;
  size_t first_ = 0;  // those before are gone
};

}  // namespace geartrain
