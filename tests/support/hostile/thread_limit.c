/* pthread_create that fails, as at a limit of threads: for tests of what a constructor leaves behind. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

static atomic_int made;           /* since `fail_thread` */
static atomic_int failing = -1;   /* number of the thread that cannot be made, from 0 on; -1: none */
static _Thread_local int exempt;  /* whether this thread's are made, and not counted */

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (create == 0) create = dlsym(RTLD_NEXT, "pthread_create");
  if (!exempt && atomic_fetch_add(&made, 1) == atomic_load(&failing)) return EAGAIN;
  return create(thread, attributes, run, argument);
}

void fail_thread(int number) {
  atomic_store(&made, 0);
  atomic_store(&failing, number);
}

int threads_made(void) {
  return atomic_load(&made);
}

void exempt_threads(int on) {
  exempt = on;
}
