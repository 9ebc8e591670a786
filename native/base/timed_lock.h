// Acquiring a pthread mutex within a time, by the monotonic clock.
#pragma once

#include <pthread.h>

namespace geartrain {

// pthread_mutex_lock that returns ETIMEDOUT after `timeout_s`; EOWNERDEAD and the other errors are pthread's. A step of
// the wall clock changes nothing. glibc has a call for this since 2.30; where it is missing the mutex is polled
// (lock_by_polling).
int lock_within(pthread_mutex_t* mutex, double timeout_s);

// The same by pthread_mutex_trylock, in slices from 1 µs to 1 ms: fair to nobody, and a waiter may see the mutex up to
// a slice late.
int lock_by_polling(pthread_mutex_t* mutex, double timeout_s);

// Whether lock_within polls; set_lock_polling(true) forces it, for tests.
bool lock_is_polled();
void set_lock_polling(bool polled);

}  // namespace geartrain
