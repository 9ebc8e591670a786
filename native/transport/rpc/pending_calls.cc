#include "transport/rpc/pending_calls.h"

#include <algorithm>

namespace geartrain {

uint64_t PendingCalls::start(uint32_t kind, Bytes header, std::span<const Bytes> buffers, bool loose,
                             Deadline deadline) {
  uint64_t tag = 0;
  {
    std::unique_lock lock(mutex_);
    if (failed_) fail(failed_kind_, reason_);
    if (unanswered_ >= max_open_) {
      std::condition_variable mine;
      read_until(lock, &mine, deadline, [&] { return unanswered_ < max_open_; });
    }
    tag = next_tag_++;
    questions_[tag].loose = loose;
    loose_open_ += loose;
    ++unanswered_;
  }
  try {
    connection_->send({tag, kind, header, buffers}, deadline);
  } catch (...) {
    forget(tag);
    throw;
  }
  if (loose) loose_.notify_one();
  return tag;
}

void PendingCalls::tell(uint64_t tag, uint32_t kind, Bytes header, Deadline deadline) {
  connection_->send({tag, kind, header, {}}, deadline);
}

void PendingCalls::wait(uint64_t tag, Message* answer, Deadline deadline) {
  std::unique_lock lock(mutex_);
  auto found = questions_.find(tag);
  if (found == questions_.end() || found->second.loose)
    fail(ErrorKind::schema, "no call number ", tag, " is waited for");
  Question& question = found->second;  // stays where it is: the map is of nodes
  std::condition_variable mine;
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
    fail(ErrorKind::hung_up, "the call was given up by another thread");
  }
  *answer = std::move(question.answer);
  questions_.erase(tag);
}

void PendingCalls::next_loose(Message* answer, Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (loose_open_ == 0 && !failed_) {
    const uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) fail(ErrorKind::timed_out, "no answer came before the deadline");
    loose_.wait_for(lock, std::chrono::nanoseconds(left_ns));
  }
  read_until(lock, &loose_, deadline, [&] { return !loose_answered_.empty(); });
  const uint64_t tag = loose_answered_.front();
  loose_answered_.pop_front();
  const auto found = questions_.find(tag);
  *answer = std::move(found->second.answer);
  questions_.erase(found);
  --loose_open_;
}

// One of the waiting threads reads for all of them; the others sleep until their answer is there, or it is their turn.
template <typename Done>
void PendingCalls::read_until(std::unique_lock<std::mutex>& lock, std::condition_variable* waiter, Deadline deadline,
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
        for (std::condition_variable* other : waiters_) other->notify_all();
        loose_.notify_all();
      } else {
        wake_another();
      }
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
  if (found == questions_.end() || found->second.answered || found->second.forgotten) return;  // or never asked
  Question& question = found->second;
  question.answered = true;
  --unanswered_;
  question.answer = std::move(message);
  if (question.loose) {
    loose_answered_.push_back(found->first);
    loose_.notify_one();
  } else if (question.waiter != nullptr) {
    question.waiter->notify_one();
  }
}

void PendingCalls::wake_another() {
  if (!reading_ && !waiters_.empty()) waiters_.front()->notify_one();
}

bool PendingCalls::ready(uint64_t tag) const {
  std::lock_guard lock(mutex_);
  const auto found = questions_.find(tag);
  return failed_ || (found != questions_.end() && found->second.answered);
}

void PendingCalls::loosen(uint64_t tag) {
  std::lock_guard lock(mutex_);
  const auto found = questions_.find(tag);
  if (found == questions_.end() || found->second.waiter != nullptr) {
    fail(ErrorKind::schema, "no call number ", tag, " that nobody waits for");
  }
  if (found->second.loose) return;
  found->second.loose = true;
  ++loose_open_;
  if (found->second.answered) loose_answered_.push_back(tag);
  loose_.notify_one();
}

void PendingCalls::forget(uint64_t tag) {
  std::lock_guard lock(mutex_);
  const auto found = questions_.find(tag);
  if (found == questions_.end() || found->second.forgotten) return;
  unanswered_ -= !found->second.answered;
  if (found->second.waiter != nullptr) {
    found->second.forgotten = true;
    found->second.waiter->notify_one();
    return;
  }
  if (found->second.loose) {
    --loose_open_;
    std::erase(loose_answered_, tag);
  }
  questions_.erase(found);
}

size_t PendingCalls::open() const {
  std::lock_guard lock(mutex_);
  return questions_.size();
}

}  // namespace geartrain
