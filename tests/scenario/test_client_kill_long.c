/* Two hundred times, at other moments each time: see test_client_kill.c. */
#include "kills.h"

int main(int argc, char **argv)
{
    return kills_main(argc, argv, 0, 200);
}
