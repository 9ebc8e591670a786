#include "transport/rpc/pending_calls.h"

#include <algorithm>

namespace geartrain {

uint64_t PendingCalls::start(uint32_t kind, Bytes header, std::span<const Bytes> buffers, Deadline deadline) {
  life_.check_process();
  uint64_t tag = 0;
  {
    std::unique_lock lock(mutex_);
    if (failed_) fail(failed_kind_, reason_);
    if (unanswered_ >= max_open_) {
      ConditionVariable mine;
      starting_.push_back(&mine);
      try {
        read_until(lock, &mine, deadline, [&] { return unanswered_ < max_open_; });
      } catch (...) {
        std::erase(starting_, &mine);
        throw;
      }
      std::erase(starting_, &mine);
    }
    tag = next_tag_++;
    questions_.try_emplace(tag);
    ++unanswered_;
  }
  try {
    connection_->send({tag, kind, header, buffers}, deadline);
  } catch (...) {
    forget(tag);
    throw;
  }
  return tag;
}

void PendingCalls::wait(uint64_t tag, Message* answer, Deadline deadline) {
  life_.check_process();
  std::unique_lock lock(mutex_);
  auto found = questions_.find(tag);
  if (found == questions_.end() || found->second.detached || found->second.dropped || found->second.waiter != nullptr) {
    fail(ErrorKind::argument, "no pending call has the number ", tag, ", or another thread waits for it");
  }
  Question& question = found->second;  // stays where it is: the map is of nodes
  ConditionVariable mine;
  if (!question.answered) {
    question.waiter = &mine;
    try {
      read_until(lock, &mine, deadline, [&] { return question.answered || question.forgotten; });
    } catch (...) {
      question.waiter = nullptr;
      if (question.forgotten) questions_.erase(tag);
      throw;
    }
  }
  if (!question.answered) {
    questions_.erase(tag);
    fail(ErrorKind::hung_up, "the call was cancelled by another thread");
  }
  *answer = std::move(question.answer);
  questions_.erase(tag);
}

void PendingCalls::next_detached(Message* answer, Deadline deadline) {
  life_.check_process();
  std::unique_lock lock(mutex_);
  while (detached_open_ == 0 && !failed_) {
    const uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) fail(ErrorKind::timed_out, "no answer came before the deadline");
    detached_.wait_for(lock, std::chrono::nanoseconds(left_ns));
  }
  read_until(lock, &detached_, deadline, [&] { return !detached_answered_.empty(); });
  const uint64_t tag = detached_answered_.front();
  detached_answered_.pop_front();
  const auto found = questions_.find(tag);
  *answer = std::move(found->second.answer);
  questions_.erase(found);
  --detached_open_;
}

// One of the waiting threads reads for all of them; the others sleep until their answer is there, or it is their turn.
template <typename Done>
void PendingCalls::read_until(std::unique_lock<std::mutex>& lock, ConditionVariable* waiter, Deadline deadline,
                              Done&& done) {
  while (!done()) {
    if (failed_) fail(failed_kind_, reason_);
    if (reading_) {
      const uint64_t left_ns = deadline.left_ns();
      if (left_ns == 0) fail(ErrorKind::timed_out, "no answer came before the deadline");
      waiters_.push_back(waiter);
      waiter->wait_for(lock, std::chrono::nanoseconds(left_ns));
      waiters_.erase(std::find(waiters_.begin(), waiters_.end(), waiter));
      continue;
    }
    reading_ = true;
    lock.unlock();
    Message message;
    try {
      connection_->receive(&message, deadline);
    } catch (const Error& error) {
      lock.lock();
      reading_ = false;
      if (error.kind != ErrorKind::timed_out) {
        failed_ = true;
        failed_kind_ = error.kind;
        reason_ = error.what();
        for (ConditionVariable* other : waiters_) other->notify_all();
        detached_.notify_all();
      } else {
        wake_another();
      }
      throw;
    } catch (...) {  // no memory for the message: another may have some for the next
      lock.lock();
      reading_ = false;
      wake_another();
      throw;
    }
    lock.lock();
    reading_ = false;
    deliver(std::move(message));
  }
  wake_another();
}

void PendingCalls::deliver(Message&& message) {
  const auto found = questions_.find(message.tag);
  if (found == questions_.end() || found->second.answered || found->second.forgotten) return;  // or never sent
  Question& question = found->second;
  question.answered = true;
  --unanswered_;
  make_place();
  if (question.dropped) {
    questions_.erase(found);
    return;
  }
  question.answer = std::move(message);
  if (question.detached) {
    detached_answered_.push_back(found->first);
    detached_.notify_one();
  } else if (question.waiter != nullptr) {
    question.waiter->notify_one();
  }
}

void PendingCalls::wake_another() {
  if (!reading_ && !waiters_.empty()) waiters_.front()->notify_one();
}

// For those who wait to start a call: who reads for all of them may go on for long.
void PendingCalls::make_place() {
  for (ConditionVariable* other : starting_) other->notify_one();
}

void PendingCalls::detach(uint64_t tag) {
  life_.check_process();
  std::lock_guard lock(mutex_);
  const auto found = questions_.find(tag);
  if (found == questions_.end() || found->second.dropped || found->second.waiter != nullptr) {
    fail(ErrorKind::argument, "no pending call has the number ", tag, ", or a thread waits for it");
  }
  if (found->second.detached) return;
  found->second.detached = true;
  ++detached_open_;
  if (found->second.answered) detached_answered_.push_back(tag);
  detached_.notify_one();
}

void PendingCalls::forget(uint64_t tag) {
  if (life_.forked()) return;
  std::lock_guard lock(mutex_);
  const auto found = questions_.find(tag);
  if (found == questions_.end() || found->second.forgotten) return;
  unanswered_ -= !found->second.answered;
  make_place();
  if (found->second.waiter != nullptr) {
    found->second.forgotten = true;
    found->second.waiter->notify_one();
    return;
  }
  if (found->second.detached) {
    --detached_open_;
    std::erase(detached_answered_, tag);
  }
  questions_.erase(found);
}

void PendingCalls::drop(uint64_t tag) {
  if (life_.forked()) return;
  std::lock_guard lock(mutex_);
  const auto found = questions_.find(tag);
  if (found == questions_.end()) return;
  Question& question = found->second;
  if (question.waiter != nullptr || question.detached) return;
  if (question.answered) {
    questions_.erase(found);
  } else {
    question.dropped = true;
  }
}

size_t PendingCalls::open() const {
  if (life_.forked()) return 0;
  std::lock_guard lock(mutex_);
  return questions_.size();
}

}  // namespace geartrain
