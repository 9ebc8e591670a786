/* Two processes whose group outlives its reducer, which somebody kills once this says "ready": every sum is right, and
 * the loss is told and counted. */

#include <geartrain_allreduce.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT 100003
#define WORLD 2u

static void die(const char* what) {
  fprintf(stderr, "%s: %s\n", what, gt_last_error());
  exit(1);
}

static void read_all(int from, char* into, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = read(from, into, bytes);
    if (got <= 0) exit(3);
    into += got;
    bytes -= (size_t)got;
  }
}

/* Structures of the first version, and of no version. */
static void sizes(const gt_options* whole) {
  gt_group* group = NULL;
  char address[GT_ADDRESS_BYTES];
  gt_options given = *whole;
  given.bytes = 12;
  if (gt_group_listen(&given, &group, address) != GT_INVALID) exit(4);
  given.bytes = sizeof given + 8;
  if (gt_group_listen(&given, &group, address) != GT_INVALID) exit(4);
  given.bytes = sizeof given;
  given.reducer_silence_s = -1;
  if (gt_group_listen(&given, &group, address) != GT_INVALID) exit(4);
  const uint32_t first[] = {0, offsetof(gt_options, outlives_reducers), offsetof(gt_options, outlives_reducers) + 4};
  for (int i = 0; i < 3; ++i) { /* what lies behind is not read */
    given.bytes = first[i];
    if (gt_group_listen(&given, &group, address) != GT_OK) die("listen");
    gt_group_close(group, 0.0);
  }
}

static void rank_main(uint32_t rank, const char* reducer, int to_parent, int from_parent) {
  const double shares[] = {0.0, 0.0, 1.0};
  const char* const reducers[] = {reducer};
  gt_options options;
  memset(&options, 0, sizeof options);
  options.bytes = sizeof options;
  options.rank = rank;
  options.world = WORLD;
  options.reducers = reducers;
  options.reducer_count = 1;
  options.shares = shares;
  sizes(&options);
  options.outlives_reducers = 1;
  options.reducer_silence_s = 2.0;
  gt_group* group = NULL;
  char mine[GT_ADDRESS_BYTES], all[WORLD * GT_ADDRESS_BYTES];
  if (gt_group_listen(&options, &group, mine) != GT_OK) die("listen");
  if (write(to_parent, mine, sizeof mine) != (ssize_t)sizeof mine) exit(3);
  read_all(from_parent, all, sizeof all);
  if (gt_group_connect(group, all, 30.0) != GT_OK) die("connect");

  gt_counts counts;
  memset(&counts, 0, sizeof counts);
  if (gt_group_counts(group, &counts) != GT_INVALID) exit(5);
  counts.bytes = sizeof counts;
  float* array = malloc(COUNT * sizeof(float));
  int lost = 0, events = 0;
  char text[512];
  for (int step = 0, left = 20; left > 0; ++step) {
    for (size_t i = 0; i < COUNT; ++i) array[i] = (float)(rank + (uint32_t)step % 1000);
    if (gt_allreduce(group, array, COUNT, GT_FLOAT32, GT_SUM, 30.0) != GT_OK) die("allreduce");
    for (size_t i = 0; i < COUNT; ++i) {
      if (array[i] != (float)(1 + 2 * (step % 1000))) exit(6);
    }
    if (gt_group_counts(group, &counts) != GT_OK) die("counts");
    lost = counts.lost_reducers == 1;
    if (gt_allreduce(group, &lost, 1, GT_INT32, GT_MIN, 30.0) != GT_OK) die("allreduce");
    left -= lost;
    while (gt_group_event(group, text, sizeof text) == GT_OK && text[0] != 0) {
      events += strstr(text, reducer) != NULL && strstr(text, "is lost (") != NULL;
      events += strstr(text, reducer) != NULL && strstr(text, "ranks do the work of") != NULL;
    }
    if (rank == 0 && step == 3) {
      puts("ready");
      fflush(stdout);
    }
  }
  if (events != 2 || counts.reducer_losses != 1 || counts.reducer_returns != 0 || counts.taken_over_bytes == 0) exit(7);
  gt_group_close(group, 5.0);
  free(array);
}

int main(int argc, char** argv) {
  int up[WORLD][2], down[WORLD][2];
  if (argc != 2) return 2;
  for (uint32_t rank = 0; rank < WORLD; ++rank) {
    if (pipe(up[rank]) != 0 || pipe(down[rank]) != 0) return 2;
    if (fork() == 0) {
      rank_main(rank, argv[1], up[rank][1], down[rank][0]);
      return 0;
    }
  }
  char all[WORLD * GT_ADDRESS_BYTES];
  for (uint32_t rank = 0; rank < WORLD; ++rank) read_all(up[rank][0], all + rank * GT_ADDRESS_BYTES, GT_ADDRESS_BYTES);
  for (uint32_t rank = 0; rank < WORLD; ++rank) {
    if (write(down[rank][1], all, sizeof all) < 0) return 2;
  }
  int failed = 0, status = 0;
  while (wait(&status) > 0) {
    failed += status != 0;
    if (status != 0) fprintf(stderr, "status %d\n", WEXITSTATUS(status));
  }
  if (failed == 0) puts("every sum was right");
  return failed != 0;
}
